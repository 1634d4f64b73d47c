"""`VllmRunner`: the ModelRunner over vLLM's own engine."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from vllm import SamplingParams as VllmSamplingParams
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput

from cacheblend.errors import BlendError
from cacheblend.metadata import CacheFuseMetadata
from cacheblend.models.loading import end_of_sequence_ids_of_folder
from cacheblend.plan import BlendPlan, Policy, require_fits, require_known
from cacheblend.protocols import BlendReport, FinishReason, PrefillHints, StepOutput
from cacheblend.recipes import LayerKV
from cacheblend.sampling_params import SamplingParams
from cacheblend.step_log import log_tokens
from cacheblend.vllm_backend.collection import Collection, collect_tokens
from cacheblend.vllm_backend.early_accounts import EarlyAccounts
from cacheblend.vllm_backend.engine_arguments import kv_bytes_per_token, make_vllm_config
from cacheblend.vllm_backend.engine_chunks import EngineChunks
from cacheblend.vllm_backend.engine_process import EngineProcess, multiprocessing_is
from cacheblend.vllm_backend.hack_kv import RecipeLayer, Recipes
from cacheblend.vllm_backend.model_identity import fingerprint_of, transformers_config
from cacheblend.vllm_backend.prompts import OutgoingPrompt, outgoing, require_token_ids
from cacheblend.vllm_backend.request_format import CollectParams, as_transfer_params
from cacheblend.vllm_backend.sampling import vllm_sampling
from cacheblend.vllm_backend.sequences import EngineSequence
from cacheblend.vllm_backend.settings import make_settings
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.store import ChunkStore

Prompt: TypeAlias = BlendPlan | Sequence[int]
Sampling: TypeAlias = SamplingParams | VllmSamplingParams


class VllmRunner:
    """Serves a model with vLLM, blending by the connector; implements `cacheblend.protocols.ModelRunner`.

    The model, its weights and all chunk KV are in the engine's processes; this one sends prompts and takes tokens.

    Args:
        config: vLLM's configuration, from `make_vllm_config`.
        folder: the model's.
        in_process: run the engine in this process, which shows its insides; one such engine at a time.

    Raises:
        BlendError: if the engine does not start, or the store's folder cannot be used.
    """

    def __init__(self, config: VllmConfig, folder: Path, in_process: bool = False) -> None:
        settings = make_settings(config.kv_transfer_config.kv_connector_extra_config)
        self._config = config
        self._end_ids = end_of_sequence_ids_of_folder(folder)
        self._model = transformers_config(config)
        self._dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._fingerprint = fingerprint_of(config)
        self.store = ChunkStore(settings.store, 0)
        self.chunks = EngineChunks(self.store)
        ranks = config.parallel_config.tensor_parallel_size
        self._recipes = Recipes(self._model, self._dtype, self._fingerprint, self.store, ranks)
        self._cache_fuse_metadata = CacheFuseMetadata()
        self.old_kvs: Sequence[LayerKV] | None = None
        self._sequences: dict[str, EngineSequence] = {}
        self._aborted: set[str] = set()
        self._held: deque[tuple[int, list[RequestOutput]]] = deque()
        self._accounts = EarlyAccounts()
        self._process = EngineProcess(config, in_process, self._accounts)
        self._collection = Collection(self._process, collect_tokens(config), self.chunks, self._hold)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        store_root: Path | None = None,
        host_budget_bytes: int = 4 << 30,
        dtype: str = "float32",
        *,
        in_process: bool = False,
        connector: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> VllmRunner:
        """Start an engine for the model in `folder`.

        Args:
            folder: a Hugging Face model folder.
            store_root: folder of chunk KV, which other processes may share; None keeps chunks in the engine's memory.
            host_budget_bytes: bytes of chunk KV that host memory may hold.
            dtype: "float32" or "bfloat16", of weights and KV.
            in_process: see the class.
            connector: further settings of `ConnectorSettings`, such as `debug_rows`.
            **engine: vLLM's engine arguments, such as `max_model_len`, `gpu_memory_utilization`,
                `tensor_parallel_size` or `speculative_config={"method": "ngram", ...}`.

        Raises:
            UnsupportedModelError: for a model or an option that no gate covers.
            BlendError: for anything else that cannot be used, in one sentence.
        """
        given = {
            "store": store_root,
            "host_budget_bytes": host_budget_bytes,
            "early_accounts": True,
            **(connector or {}),
        }
        with multiprocessing_is(not in_process):
            config = make_vllm_config(folder, make_settings(given), dtype, engine)
            return cls(config, folder, in_process)

    @property
    def fingerprint(self) -> str:
        """See `ModelRunner.fingerprint`; the same as the reference runner's for this folder and dtype."""
        return self._fingerprint

    @property
    def max_model_len(self) -> int:
        """See `ModelRunner.max_model_len`."""
        return int(self._config.model_config.max_model_len)

    @property
    def cache_fuse_metadata(self) -> CacheFuseMetadata:
        """CacheBlend's switches; they rule prompts given as bare token ids."""
        return self._cache_fuse_metadata

    @property
    def layers(self) -> tuple[RecipeLayer, ...]:
        """`layers[i].self_attn.hack_kv` is [k, v] of the last collected prompt."""
        return self._recipes.layers

    @property
    def kv_bytes_per_token(self) -> int:
        """See `ModelRunner.kv_bytes_per_token`; of all ranks together."""
        return kv_bytes_per_token(self._model, self._dtype)

    @property
    def schedules_kv(self) -> bool:
        """See `ModelRunner.schedules_kv`: the connector does."""
        return True

    @property
    def engine(self) -> Any:
        """vLLM's `LLMEngine`."""
        return self._process.engine

    def collect(self, chunks: Sequence[Sequence[int]], prefix: Sequence[int]) -> list[ChunkKey]:
        """See `ModelRunner.collect`; all of them at once, in vLLM's batches. What runs meanwhile goes on.

        Raises:
            BlendError: also if vLLM ends a chunk's prefill before its KV is taken; nothing is then left running.
        """
        for chunk in chunks:
            self._require_collectable(chunk, prefix)
        identities = [ChunkIdentity(self._fingerprint, tuple(prefix), tuple(chunk)) for chunk in chunks]
        self.chunks.refresh()
        missing = {identity.key: identity for identity in identities if self.chunks.lookup(identity) is None}
        self._collection.run(list(missing.values()))
        return [identity.key for identity in identities]

    def prefill(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        sequence_id: str | None = None,
        policy: Policy = Policy.BLEND,
        hints: PrefillHints | None = None,
    ) -> str:
        """See `ModelRunner.prefill`.

        `sampling` may be vLLM's own `SamplingParams`, with all it offers: `n`, `logprobs`, structured outputs and so
        on; see `output`. Steps then give the tokens of the first completion.
        """
        sampling = sampling or SamplingParams()
        sequence_id = sequence_id or uuid.uuid4().hex
        if sequence_id in self._sequences:
            raise BlendError(f"Sequence id '{sequence_id}' is in use; release it first or choose another.")
        self._require_servable(prompt, sampling)
        sent, when_prefilled = self._outgoing(prompt, policy, hints)
        try:
            self._process.add(sequence_id, sent.token_ids, vllm_sampling(sampling, self._end_ids, sent.transfer))
        except BaseException:
            if when_prefilled is not None:
                when_prefilled()
            raise
        self._sequences[sequence_id] = EngineSequence(sequence_id, sent, when_prefilled)
        return sequence_id

    def step(self) -> StepOutput:
        """See `ModelRunner.step`; waits for vLLM's next outputs, and returns at once where nothing runs.

        Step ids are the engine's own, counted by the connector: where several steps brought nothing, ids are left out.
        """
        finished = dict.fromkeys(self._aborted, FinishReason.ABORT)
        self._aborted.clear()
        tokens: dict[str, tuple[int, ...]] = {}
        step_id, outputs = self._held.popleft() if self._held else self._next_outputs()
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None or sequence.finished is not None:
                continue
            if new := sequence.take(output):
                tokens[sequence.id] = tokens.get(sequence.id, ()) + new
            if sequence.finished is not None:
                finished[sequence.id] = sequence.finished
        log_tokens(step_id, tokens)
        return StepOutput(step_id, tokens, finished)

    def report(self, sequence_id: str) -> BlendReport:
        """See `ModelRunner.report`; known from the first token on, also where the client ends the sequence itself."""
        return self._sequences[sequence_id].report(self._accounts.of(sequence_id))

    def output(self, sequence_id: str) -> RequestOutput:
        """All that vLLM has returned for a sequence so far: every completion with its log-probabilities and text.

        Raises:
            KeyError: for an unknown or released sequence.
            BlendError: if vLLM has returned nothing yet.
        """
        output = self._sequences[sequence_id].output
        if output is None:
            raise BlendError(f"vLLM has returned nothing yet for sequence '{sequence_id}'; step until it has.")
        return output

    def abort(self, sequence_id: str) -> None:
        """See `ModelRunner.abort`."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.finished is None:
            self._process.abort([sequence_id])
            sequence.end(FinishReason.ABORT)
            self._aborted.add(sequence_id)

    def release(self, sequence_id: str) -> None:
        """See `ModelRunner.release`; one that still runs is ended."""
        self.abort(sequence_id)
        self._sequences.pop(sequence_id, None)
        self._aborted.discard(sequence_id)
        self._accounts.forget(sequence_id)

    def generate(self, prompt: Prompt, sampling: Sampling | None = None) -> list[int]:
        """Run one prompt to its end; bare token ids follow `cache_fuse_metadata`, CacheBlend's recipes in one call.

        Returns:
            The new token ids of the first completion.
        """
        sequence_id = self.prefill(prompt, sampling)
        generated: list[int] = []
        try:
            while self._sequences[sequence_id].finished is None:
                generated.extend(self.step().tokens.get(sequence_id, ()))
        finally:
            self.release(sequence_id)
        return generated

    def close(self) -> None:
        """Shut the engine down, and wait for its processes to end. Closing again does nothing."""
        for sequence in self._sequences.values():
            sequence.prefilled()
        self._process.close()
        self._recipes.close()
        self.store.close()

    def _outgoing(
        self, prompt: Prompt, policy: Policy, hints: PrefillHints | None
    ) -> tuple[OutgoingPrompt, Callable[[], None] | None]:
        """What is sent, and what is to be done once it is prefilled."""
        if isinstance(prompt, BlendPlan):
            return outgoing(prompt, policy, self._fingerprint, hints=hints), None
        token_ids = require_token_ids(prompt)
        if self._cache_fuse_metadata["check"]:
            self._recipes.require_folder()
            plan, namespace, chunk = self._recipes.put_old_kvs(self._cache_fuse_metadata, token_ids, self.old_kvs)
            return outgoing(plan, policy, self._fingerprint, namespace), lambda: self._recipes.forget(chunk)
        if self._cache_fuse_metadata["collect"]:
            self._recipes.require_folder()
            namespace, identity = self._recipes.begin_collecting(token_ids)
            transfer = as_transfer_params(CollectParams(collect=0, namespace=namespace))
            return OutgoingPrompt(token_ids, transfer), lambda: self._recipes.publish(identity)
        return OutgoingPrompt(token_ids, None), None

    def _next_outputs(self) -> tuple[int, list[RequestOutput]]:
        """vLLM's, and the id of the step that made them."""
        outputs = self._process.step()
        return self._accounts.step_id, outputs

    def _hold(self, outputs: list[RequestOutput]) -> None:
        """Keep what came for running requests while chunks were collected, a step's outputs for each later step."""
        if outputs:
            self._held.append((self._accounts.step_id, outputs))

    def _require_servable(self, prompt: Prompt, sampling: Sampling) -> None:
        token_ids = prompt.token_ids if isinstance(prompt, BlendPlan) else require_token_ids(prompt)
        require_fits(len(token_ids), sampling.max_tokens or 1, self.max_model_len)
        require_known(token_ids, int(self._model.vocab_size))
        if isinstance(prompt, BlendPlan) and prompt.selector is not None:
            prompt.selector.shares(int(self._model.num_hidden_layers))
        if sampling.stop and self.engine.tokenizer is None:
            raise BlendError("Stop strings need a tokenizer, and this model folder has none; use stop_token_ids.")

    def _require_collectable(self, chunk: Sequence[int], prefix: Sequence[int]) -> None:
        if not chunk:
            raise BlendError("A chunk has no tokens; leave it out.")
        require_known((*prefix, *chunk), int(self._model.vocab_size))
        longest = self.max_model_len - collect_tokens(self._config)
        if len(prefix) + len(chunk) > longest:
            raise BlendError(
                f"A chunk of {len(chunk)} tokens behind a prefix of {len(prefix)} does not fit the {longest} that vLLM "
                "can collect at once; use smaller chunks."
            )
