"""The bench of the engine's gates: vLLM with the connector, the reference runner over the same store, and an oracle
that is transformers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cacheblend.plan import BlendPlan, Segment, SegmentRole
from cacheblend.reference.runner import ReferenceRunner
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.vllm_backend.settings import ConnectorSettings
from kvstore.key import ChunkIdentity, ShardLayout
from kvstore.store import ChunkStore
from kvstore.tiers import Tier

GIB = 1 << 30
ALL_LOGPROBS = -1
VOCABULARY = 256


@dataclass(frozen=True)
class Ask:
    """A prompt: parts in order, the question last. A part that is reusable is looked up in the store."""

    parts: tuple[tuple[tuple[int, ...], bool], ...]
    options: dict[str, Any] = field(default_factory=dict)
    plain: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return [token for ids, _ in self.parts for token in ids]

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        if self.plain:
            return None
        segments = [{"tokens": len(ids), "reuse": reuse} for ids, reuse in self.parts]
        return {"cacheblend": {"version": 1, "segments": segments, **self.options}}

    def asked_plainly(self) -> Ask:
        return Ask(self.parts, plain=True, sampling=self.sampling)


@dataclass(frozen=True)
class Answer:
    """Tokens of each completion, [tokens, vocabulary] log-probabilities of the first one, and the account."""

    completions: tuple[tuple[int, ...], ...]
    logprobs: torch.Tensor
    meta: dict[str, Any]
    cached: int
    finish_reason: str | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.completions[0]

    @property
    def first(self) -> torch.Tensor:
        return self.logprobs[0]

    @property
    def layer_rows(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple((layer, tuple(rows)) for layer, rows in self.meta["layer_rows"])


class EngineBench:
    """One engine.

    Args:
        folder: the model's.
        store: folder of chunk KV, shared with the reference runner.
        connector: whether the engine has it at all.
        settings: of the connector.
        engine: options of `vllm.LLM`.
    """

    def __init__(
        self,
        folder: Path,
        store: Path,
        *,
        connector: bool = True,
        settings: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from cacheblend.vllm_backend.plugin import register

        register()
        self.folder, self.store_folder = folder, store
        self.settings = {"store": str(store), "debug_rows": True, **(settings or {})}
        transfer = KVTransferConfig(
            kv_connector="CacheBlendConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=self.settings,
        )
        options: dict[str, Any] = {
            "dtype": "float32",
            "block_size": 32,
            "enforce_eager": True,
            "max_model_len": 6144,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": True,
            "seed": 0,
            "max_logprobs": -1,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            **engine,
        }
        self.llm = LLM(model=str(folder), kv_transfer_config=transfer if connector else None, **options)
        self.engine = self.llm.llm_engine
        self.dtype = options["dtype"]
        self._ids = 0
        self._reference: ReferenceRunner | None = None
        self._oracle: ReferenceRunner | None = None

    @property
    def reference(self) -> ReferenceRunner:
        """The reference runner over the same store folder."""
        if self._reference is None:
            store = ChunkStore(self.store_folder, 2 * GIB)
            self._reference = ReferenceRunner.from_folder(self.folder, store, self.dtype)
        return self._reference

    @property
    def oracle(self) -> ReferenceRunner:
        """A reference runner with a store of its own, in memory."""
        if self._oracle is None:
            self._oracle = ReferenceRunner.from_folder(self.folder, ChunkStore(None, GIB), self.dtype)
        return self._oracle

    def forget_oracles_chunks(self) -> None:
        """Let every chunk that the oracle has computed go."""
        store = self.oracle._store
        assert store is not None
        for record in store.records():
            store.evict(record.key, Tier.HOST)

    @property
    def reference_store(self) -> ChunkStore:
        store = self.reference._store
        assert store is not None
        return store

    @property
    def scheduler_half(self) -> Any:
        """The connector's half in the scheduler; of an engine in this process only."""
        return self.engine.engine_core.engine_core.scheduler.connector.scheduler_half

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def chunk_store(self) -> ChunkStore:
        """The worker's store; of an engine in this process only."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker_half._held.store

    def forget_host_copies(self) -> None:
        """Let every chunk leave the worker's host memory, behind the scheduler's back."""
        for record in self.chunk_store.records():
            self.chunk_store.evict(record.key, Tier.HOST)

    def change_budgets(self, **nbytes: int) -> dict[str, int]:
        """Have a request change byte budgets; those that hold some steps later, time for the worker to take memory."""
        params = {"cacheblend": {"version": 1, "budgets": nbytes}}
        (output,) = self._serve([((5, 6, 7), params)], {"max_tokens": 64})
        return dict(output.kv_transfer_params["cacheblend"]["budgets"])

    def stored_layer(
        self, chunk: Sequence[int], prefix: Sequence[int], layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a chunk as the engine stored them, all ranks' heads together."""
        identity = self.identity(chunk, prefix)
        self.reference_store.refresh()
        ranks = ShardLayout(0, self.engine.vllm_config.parallel_config.tensor_parallel_size).all_ranks()
        parts = [self.reference_store.get(identity, rank) for rank in ranks]
        return torch.cat([p.k(layer) for p in parts], dim=1), torch.cat([p.v(layer) for p in parts], dim=1)

    def ids(self, count: int, seed: int) -> tuple[int, ...]:
        """Random token ids above the special ones."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    def collect(self, chunks: Sequence[Sequence[int]], prefix: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Have the engine collect chunks behind a prefix, all at once."""
        params = {"cacheblend": {"version": 1, "collect": len(prefix)}}
        asked = [([*prefix, *chunk], params) for chunk in chunks]
        return [dict(o.kv_transfer_params["cacheblend"]) for o in self._serve(asked, {"max_tokens": 2})]

    def identity(self, chunk: Sequence[int], prefix: Sequence[int] = ()) -> ChunkIdentity:
        return ChunkIdentity(self.reference.fingerprint, tuple(prefix), tuple(chunk))

    def ask(self, *asks: Ask, tokens: int = 1) -> list[Answer]:
        """Serve prompts together, greedily unless they say otherwise."""
        outputs = self._serve(
            [(ask.token_ids, ask.kv_transfer_params) for ask in asks],
            {"max_tokens": tokens, "logprobs": ALL_LOGPROBS},
            [ask.sampling for ask in asks],
        )
        return [self.answer(output) for output in outputs]

    def one(self, ask: Ask, tokens: int = 1) -> Answer:
        return self.ask(ask, tokens=tokens)[0]

    def add(self, ask: Ask, tokens: int = 8) -> str:
        """Queue a prompt; the caller steps the engine."""
        self._ids += 1
        request_id = f"r{self._ids}"
        params = self._sampling(
            ask.kv_transfer_params, {"max_tokens": tokens, "logprobs": ALL_LOGPROBS, **ask.sampling}
        )
        self.engine.add_request(request_id, {"prompt_token_ids": ask.token_ids}, params)
        return request_id

    def add_collect(self, chunk: Sequence[int], prefix: Sequence[int]) -> str:
        """Queue the collecting of a chunk; the caller steps the engine."""
        self._ids += 1
        request_id = f"c{self._ids}"
        params = self._sampling({"cacheblend": {"version": 1, "collect": len(prefix)}}, {"max_tokens": 2})
        self.engine.add_request(request_id, {"prompt_token_ids": [*prefix, *chunk]}, params)
        return request_id

    def answer(self, output: Any) -> Answer:
        """An output of vLLM's as ours."""
        meta = dict((output.kv_transfer_params or {}).get("cacheblend", {}))
        first = output.outputs[0]
        rows = []
        for step in first.logprobs or ():
            row = torch.full((VOCABULARY,), -torch.inf)
            for token, logprob in step.items():
                row[token] = logprob.logprob
            rows.append(row)
        logprobs = torch.stack(rows) if rows else torch.empty(0, VOCABULARY)
        completions = tuple(tuple(c.token_ids) for c in output.outputs)
        return Answer(completions, logprobs, meta, output.num_cached_tokens or 0, first.finish_reason)

    def full(self, ask: Ask) -> torch.Tensor:
        """[vocabulary] log-probabilities after the prompt, all of it prefilled by the reference runner."""
        return self.full_forced(ask)[-1]

    def full_forced(self, ask: Ask, forced: Sequence[int] = ()) -> torch.Tensor:
        """[1 + forced, vocabulary]: the same along ids that follow."""
        plan = BlendPlan((Segment(SegmentRole.QUESTION, tuple(ask.token_ids)),))
        return self.oracle.score(plan, forced)[0]

    def replayed(
        self, ask: Ask, answer: Answer, prefix: Sequence[int] = (), forced: Sequence[int] = ()
    ) -> torch.Tensor:
        """[1 + forced, vocabulary]: the reference runner reusing the very chunks and recomputing the very rows.

        Its chunks are of its own making, so that a fault in what the engine stored shows as well.

        Args:
            ask: the prompt.
            answer: the engine's, which names its rows.
            prefix: what its chunks were encoded behind.
            forced: ids that follow.
        """
        if ask.plain or answer.meta["mode"] == "full":
            return self.full_forced(ask, forced)
        question = ask.options.get("question", len(ask.parts) - 1)
        reused = {start for start, _ in answer.meta["reused_spans"]}
        segments, start = [], 0
        for ids, _ in ask.parts[:question]:
            identity = self.identity(ids, prefix) if start in reused else None
            if identity is not None:
                self.oracle.collect([ids], prefix)
            segments.append(Segment(SegmentRole.CHUNK, ids, identity))
            start += len(ids)
        tail = tuple(token for ids, _ in ask.parts[question:] for token in ids)
        segments.append(Segment(SegmentRole.QUESTION, tail))
        carry_drift = ask.options.get("carry_drift", ConnectorSettings().carry_drift)
        plan = BlendPlan(tuple(segments), GivenRowsSelector(answer.layer_rows), carry_drift)
        return self.oracle.score(plan, forced)[0]

    def close(self) -> None:
        """Shut the engine down, so that another one can be started in this process."""
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()

    def _serve(
        self,
        asked: Sequence[tuple[Sequence[int], dict[str, Any] | None]],
        common: dict[str, Any],
        own: Sequence[dict[str, Any]] = (),
    ) -> list[Any]:
        own = own or [{}] * len(asked)
        params = [self._sampling(p, {**common, **o}) for (_, p), o in zip(asked, own, strict=True)]
        prompts = [{"prompt_token_ids": list(ids)} for ids, _ in asked]
        return self.llm.generate(prompts, params, use_tqdm=False)

    @staticmethod
    def _sampling(transfer: dict[str, Any] | None, given: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        extra = {"kv_transfer_params": transfer} if transfer else None
        return SamplingParams(**{**fixed, **given}, extra_args=extra, output_kind=RequestOutputKind.FINAL_ONLY)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference of two distributions' log-probabilities."""
    return float((got.log_softmax(-1) - want.log_softmax(-1)).abs().max())


@contextmanager
def running(*args: Any, **kwargs: Any) -> Iterator[EngineBench]:
    """A bench that is closed at the end."""
    bench = EngineBench(*args, **kwargs)
    try:
        yield bench
    finally:
        bench.close()
