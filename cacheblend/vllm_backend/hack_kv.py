"""CacheBlend's recipes on vLLM: chunks under a name of their own in the folder that engine and client share."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend.errors import BlendError
from cacheblend.metadata import CacheFuseMetadata
from cacheblend.models.loading import torch_dtype
from cacheblend.plan import BlendPlan
from cacheblend.recipes import LayerKV, plan_from_old_kvs, position_free
from cacheblend.vllm_backend.engine_arguments import head_dim_of
from cacheblend.vllm_backend.request_format import fingerprint_in
from cacheblend.vllm_backend.rotary import RotaryTables
from kvstore.chunk import ChunkKV
from kvstore.errors import ChunkUnavailable
from kvstore.key import ChunkIdentity
from kvstore.store import ChunkStore

_CPU = torch.device("cpu")


class EngineKV:
    """The engine's KV as the recipes see it; implements `cacheblend.recipes.RotatedKV`.

    Args:
        config: the model's transformers configuration.
        dtype: of the KV.
    """

    device = _CPU

    def __init__(self, config: Any, dtype: str) -> None:
        self._rotary = RotaryTables(config, _CPU)
        self.num_layers = int(config.num_hidden_layers)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = head_dim_of(config)
        self.dtype = torch_dtype(dtype)

    @property
    def rope_scaling(self) -> float:
        """See `RotatedKV.rope_scaling`."""
        return self._rotary.scaling

    def rotary_tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RotatedKV.rotary_tables`."""
        return self._rotary.tables(positions)


class CollectedPrompt:
    """The KV of one prompt, read from the folder when a layer is asked for.

    Args:
        kv: of the model.
        store: the folder.
        identity: the prompt as a chunk.
    """

    def __init__(self, kv: EngineKV, store: ChunkStore, identity: ChunkIdentity) -> None:
        self._kv = kv
        self._store = store
        self.identity = identity
        self._chunk: ChunkKV | None = None

    def layer(self, index: int) -> LayerKV:
        """[k, v] of a layer, each [tokens, kv_heads * head_dim]; k before RoPE.

        Raises:
            BlendError: if the folder does not have it (any more).
        """
        if self._chunk is None:
            try:
                self._chunk = self._store.get(self.identity)
            except ChunkUnavailable as error:
                raise BlendError(
                    f"hack_kv of the last collected prompt cannot be read ({error.reason}); collect it again."
                ) from error
        return position_free(self._kv, self._chunk.k(index), self._chunk.v(index))


class RecipeAttention:
    """Stands where CacheBlend's users look for `hack_kv`."""

    def __init__(self, recipes: Recipes, index: int) -> None:
        self._recipes = recipes
        self._index = index

    @property
    def hack_kv(self) -> HackKV:
        """[k, v] of the last collected prompt, read when they are indexed.

        Raises:
            AttributeError: if no prompt was collected.
        """
        if self._recipes.collected is None:
            raise AttributeError("no prompt was collected; set cache_fuse_metadata['collect'] and run one")
        return HackKV(self._recipes.collected, self._index)


@dataclass(frozen=True, slots=True)
class RecipeLayer:
    """A decoder layer of an engine in another process: only what the recipes look at."""

    self_attn: RecipeAttention


class HackKV(Sequence[torch.Tensor]):
    """A layer's [k, v] of one collected prompt; read-only, each index reads anew and gives a copy.

    Args:
        prompt: which prompt's.
        index: the layer.
    """

    def __init__(self, prompt: CollectedPrompt, index: int) -> None:
        self._prompt = prompt
        self._index = index

    def __len__(self) -> int:
        return 2

    def __getitem__(self, kind: Any) -> Any:
        return self._prompt.layer(self._index)[kind]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._prompt.layer(self._index))


class Recipes:
    """The files behind `hack_kv` and `old_kvs`.

    Args:
        config: the model's transformers configuration.
        dtype: of the KV.
        fingerprint: of the model.
        store: a view of the engine's folder.
        ranks: tensor-parallel size.
    """

    def __init__(self, config: Any, dtype: str, fingerprint: str, store: ChunkStore, ranks: int) -> None:
        self._kv = EngineKV(config, dtype)
        self._fingerprint = fingerprint
        self._store = store
        self._ranks = ranks
        self.collected: CollectedPrompt | None = None
        self.layers = tuple(RecipeLayer(RecipeAttention(self, index)) for index in range(self._kv.num_layers))

    def require_folder(self) -> None:
        """Refuse what cannot be shared with the engine.

        Raises:
            BlendError: without a folder, or with tensor parallelism.
        """
        if self._store.disk is None:
            raise BlendError(
                "cache_fuse_metadata's `collect` and `check` hand KV to and from vLLM through the store's folder; "
                "give the runner one."
            )
        if self._ranks > 1:
            raise BlendError(
                f"cache_fuse_metadata's `collect` and `check` work on one rank, not on {self._ranks}; "
                "use tensor_parallel_size 1."
            )

    def begin_collecting(self, token_ids: Sequence[int]) -> tuple[str, ChunkIdentity]:
        """A namespace for a prompt that is to be collected, and what it will be stored as."""
        namespace = f"hack-{uuid.uuid4().hex}"
        return namespace, ChunkIdentity(fingerprint_in(self._fingerprint, namespace), (), tuple(token_ids))

    def publish(self, identity: ChunkIdentity) -> None:
        """The prompt is collected: `hack_kv` is its KV from now on, and the one before is gone."""
        before, self.collected = self.collected, CollectedPrompt(self._kv, self._store, identity)
        if before is not None:
            self.forget(before.identity)

    def put_old_kvs(
        self, metadata: CacheFuseMetadata, token_ids: Sequence[int], old_kvs: Sequence[LayerKV] | None
    ) -> tuple[BlendPlan, str, ChunkIdentity]:
        """Put `old_kvs` where the engine finds them.

        Returns:
            The plan of the third recipe, the namespace of its one chunk, and the chunk, to be forgotten when the
            prompt is prefilled.

        Raises:
            BlendError: if `old_kvs` or the switches do not fit the prompt, or the folder does not take them.
        """
        # A new name each time: an engine that still has the chunk in memory must not take one user's for another's.
        namespace = f"old-{uuid.uuid4().hex}"
        fingerprint = fingerprint_in(self._fingerprint, namespace)
        plan, chunk = plan_from_old_kvs(self._kv, metadata, token_ids, old_kvs, fingerprint)
        assert plan.selector is not None
        plan.selector.shares(self._kv.num_layers)
        report = self._store.put(chunk)
        if not report.on_disk:
            raise BlendError(f"The store's folder does not take old_kvs ({report.reason}); make room or name another.")
        return plan, namespace, chunk.identity

    def forget(self, identity: ChunkIdentity) -> None:
        """Delete a chunk's file, if it is there, and the folders that only it was in."""
        disk = self._store.disk
        assert disk is not None
        disk.delete(identity.key, identity.fingerprint, [self._store.shard])
        path = disk.path_of(identity.key, identity.fingerprint, self._store.shard)
        for folder in list(path.parents)[: len(path.relative_to(disk.root).parts) - 1]:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def close(self) -> None:
        """Delete the collected prompt's file."""
        if self.collected is not None:
            self.forget(self.collected.identity)
            self.collected = None
