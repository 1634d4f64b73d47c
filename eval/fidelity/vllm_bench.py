"""The bench over vLLM's engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cacheblend.plan import BlendPlan, Policy, Segment, SegmentRole
from cacheblend.protocols import FinishReason
from cacheblend.request import RequestOutcome
from eval.errors import EvalError
from eval.fidelity.arms import FULL, FULL_AGAIN, Arm, Row
from eval.fidelity.bench import WARM_UP, FidelityBench, LaidOutQuestion, TimedAnswer
from eval.fidelity.priming import Priming
from pipelines.config import PipelineConfig
from pipelines.models import resolve_model
from pipelines.precompute import PrecomputeSummary, precompute_chunks
from pipelines.runners import VLLM, load_engine, require_installed

if TYPE_CHECKING:
    from cacheblend.vllm_backend.runner import Prompt, VllmRunner

SCORED_AT_A_TIME = 32
"""Requests with whole distributions in flight; each brings a number for every token of the vocabulary."""


@dataclass
class _Request:
    """What is sent, and what came back; `key` is the sender's."""

    key: Any
    prompt: Prompt
    sampling: Any
    policy: Policy = Policy.BLEND
    submitted: float = 0.0
    first_token: float | None = None
    tokens: list[int] = field(default_factory=list)
    end: FinishReason = FinishReason.ERROR


class VllmBench(FidelityBench):
    """Runs requests together, as vLLM batches them.

    One engine, with prefix caching, serves every arm: `full` and `full-again` skip what is cached, `prefix-cached`
    does not, and blended requests have hashes of their own. A forced answer's requests share their arm's one blend.

    Args:
        config: as for `FidelityBench`, and the engine options.
        in_flight: answers generated together. Their times to first token are those of requests that share the engine;
            with 1, of requests alone.
        priming: as for `FidelityBench`.

    Raises:
        EvalError, PipelineError, BlendError, ModelError, StoreError: one sentence on what cannot be used.
    """

    engine_name = VLLM
    is_gated_elsewhere = False

    def __init__(self, config: PipelineConfig, in_flight: int, priming: Priming | None = None) -> None:
        require_installed(VLLM)
        # Imported here because it imports vLLM, which need not be installed.
        from cacheblend.vllm_backend import forced

        folder = resolve_model(config.model)
        super().__init__(config, folder, priming)
        options = {"enable_prefix_caching": True, **forced.ENGINE_OPTIONS, **config.engine_options}
        self._loaded = load_engine(config.model_copy(update={"engine_options": options}), folder)
        self._runner: VllmRunner = self._loaded.runner  # type: ignore[assignment]
        self._forced = forced
        self._in_flight = in_flight

    @property
    def device(self) -> str:
        """See `FidelityBench.device`."""
        return str(self._runner.engine.vllm_config.device_config.device_type)

    def build(self, question: LaidOutQuestion) -> PrecomputeSummary:
        """See `FidelityBench.build`.

        Raises:
            EvalError: no tier has room for them.
        """
        shelf, at_once = self._loaded.shelf, self._loaded.chunks_per_call
        built = precompute_chunks(
            self._identities(question), shelf, self._collect, self.kv_bytes_per_token, None, False, at_once
        )
        if built.not_kept:
            gib = self.config.host_budget_bytes / (1 << 30)
            raise EvalError(
                f"{built.not_kept} chunks of question {question.example.id} found no room; "
                f"give --host-gib more than {gib:.2f}, or a --cache-dir."
            )
        return built

    def warm_up(self, question: LaidOutQuestion) -> None:
        """See `FidelityBench.warm_up`; what vLLM's prefix cache holds afterwards is forgotten.

        Raises:
            EvalError: vLLM does not forget it.
        """
        for _ in self.answers(question, WARM_UP):
            pass
        if not self._runner.engine.reset_prefix_cache():
            raise EvalError("vLLM did not empty its prefix cache after the warm-up; its own log says why.")

    def answers(self, question: LaidOutQuestion, rows: Sequence[Row]) -> Iterator[tuple[Row, TimedAnswer]]:
        """See `FidelityBench.answers`; up to `in_flight` together."""
        requests = [
            _Request(
                row,
                self._plan(question, row.arm),
                self._forced.greedy(self.config.max_tokens, _is_uncached(row.arm)),
                _policy(row.arm),
            )
            for row in rows
        ]
        for request, sequence_id in self._serve(requests, self._in_flight):
            yield request.key, TimedAnswer(self._outcome(request, sequence_id))

    def scores(
        self, question: LaidOutQuestion, arms: Sequence[Arm], answer: Sequence[int]
    ) -> Iterator[tuple[Arm, torch.Tensor]]:
        """See `FidelityBench.scores`; one request for each token of the answer."""
        requests = [
            _Request((arm, done), *self._forced_request(question, arm, answer[:done]))
            for arm in arms
            for done in range(len(answer))
        ]
        scored: dict[Arm, dict[int, torch.Tensor]] = {arm: {} for arm in arms}
        recomputed: dict[Arm, set[int]] = {arm: set() for arm in arms}
        vocabulary = int(self._runner.engine.vllm_config.model_config.get_vocab_size())
        for request, sequence_id in self._serve(requests, SCORED_AT_A_TIME):
            arm, done = request.key
            output = self._runner.output(sequence_id)
            scored[arm][done] = self._forced.log_probabilities(output, vocabulary)
            if not arm.is_reference:
                recomputed[arm].add(_recomputed(self._forced.account_of(output), arm, question))
            if len(scored[arm]) == len(answer):
                if len(recomputed[arm]) > 1:
                    raise EvalError(f"Scores of arm {arm.name} on question {question.example.id} chose different rows.")
                found = scored.pop(arm)
                yield arm, torch.stack([found[done] for done in range(len(answer))])

    def forget(self, question: LaidOutQuestion) -> None:
        """Nothing: other questions share chunks with this one, and the engine rules its memory."""

    def close(self) -> None:
        """See `FidelityBench.close`."""
        self._runner.close()

    def _serve(self, requests: Sequence[_Request], at_a_time: int) -> Iterator[tuple[_Request, str]]:
        """Requests as they end, each with its sequence, which is released afterwards."""
        waiting = deque(requests)
        running: dict[str, _Request] = {}
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    request = waiting.popleft()
                    request.submitted = time.perf_counter()
                    sequence_id = self._runner.prefill(request.prompt, request.sampling, policy=request.policy)
                    running[sequence_id] = request
                    if request.sampling.logprobs is not None:
                        self._forced.keep_arrays(self._runner.engine, sequence_id)
                step = self._runner.step()
                now = time.perf_counter()
                for sequence_id, tokens in step.tokens.items():
                    running[sequence_id].tokens.extend(tokens)
                    running[sequence_id].first_token = running[sequence_id].first_token or now
                for sequence_id, reason in step.finished.items():
                    running[sequence_id].end = reason
                    yield running[sequence_id], sequence_id
                    del running[sequence_id]
                    self._runner.release(sequence_id)
        finally:
            for sequence_id in running:
                self._runner.release(sequence_id)

    def _outcome(self, request: _Request, sequence_id: str) -> RequestOutcome:
        if request.first_token is None:
            raise EvalError(f"vLLM ended a request without an answer ({request.end}); its own log says why.")
        ttft_ms = (request.first_token - request.submitted) * 1e3
        report = self._runner.report(sequence_id)
        return RequestOutcome(sequence_id, tuple(request.tokens), request.end, ttft_ms, None, 0.0, report)

    def _forced_request(
        self, question: LaidOutQuestion, arm: Arm, answer: Sequence[int]
    ) -> tuple[tuple[int, ...], Any]:
        plan = self._plan(question, arm)
        return self._forced.forced_request(plan, _policy(arm), self.fingerprint, answer, _is_uncached(arm))

    def _plan(self, question: LaidOutQuestion, arm: Arm) -> BlendPlan:
        def segment(chunk: tuple[int, ...]) -> Segment:
            return Segment(SegmentRole.CHUNK, chunk, None if arm.is_reference else self._identity(chunk))

        return question.plan(segment, arm.selector, arm.carry_drift)


def _policy(arm: Arm) -> Policy:
    return Policy.FULL if arm.is_reference else Policy.BLEND


def _is_uncached(arm: Arm) -> bool:
    return arm.name in (FULL, FULL_AGAIN)


def _recomputed(account: Any, arm: Arm, question: LaidOutQuestion) -> int:
    """Rows that a scored request's blend recomputed.

    Raises:
        EvalError: it was not blended as its arm says.
    """
    reasons = ["not_reported"] if account is None else account["fallback_reasons"]
    if reasons or account["mode"] != "blend":
        why = ", ".join(dict.fromkeys(reasons)) or "prefilled in full"
        raise EvalError(f"Arm {arm.name} on question {question.example.id} cannot be scored: {why}.")
    return int(account["recomputed_tokens"])
