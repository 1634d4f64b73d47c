"""Requests whose answer is laid down beforehand (teacher forcing), and the distributions that vLLM gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.v1.engine.logprobs import LogprobsProcessor

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Policy
from cacheblend.vllm_backend.prompts import outgoing
from cacheblend.vllm_backend.request_format import PARAMS_KEY, BlendParams, as_transfer_params, segments_of

ENGINE_OPTIONS = {"max_logprobs": -1}
"""What an engine must be started with to give whole distributions."""


def forced_request(
    plan: BlendPlan, policy: Policy, fingerprint: str, answer: Sequence[int], uncached: bool = False
) -> tuple[tuple[int, ...], VllmSamplingParams]:
    """The prompt followed by the beginning of an answer, with whole log-probabilities of the token that comes next.

    What follows the question is fresh rows that have no say in which rows are recomputed. Requests that differ in them
    alone share one blend, through vLLM's prefix cache.

    Args:
        plan: the prompt.
        policy: how it is prefilled.
        fingerprint: of the model that serves.
        answer: the ids that follow it, none for the first token's distribution.
        uncached: compute every row, whatever the prefix cache holds; nothing is blended then.

    Returns:
        What `VllmRunner.prefill` takes: the token ids, and the sampling parameters that carry the plan.
    """
    sent = outgoing(plan, policy, fingerprint)
    return (*sent.token_ids, *answer), VllmSamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=-1,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        skip_reading_prefix_cache=uncached,
        extra_args=None if sent.transfer is None else {"kv_transfer_params": _with_tail(sent.transfer, len(answer))},
    )


def greedy(max_tokens: int, uncached: bool = False) -> VllmSamplingParams:
    """Of an answer that is not forced; `uncached` as in `forced_request`."""
    return VllmSamplingParams(
        temperature=0.0, max_tokens=max_tokens, detokenize=False, skip_reading_prefix_cache=uncached
    )


class ArrayLogprobs(LogprobsProcessor):
    """Keeps a request's log-probabilities as the arrays in which they come: (token ids, log-probabilities) a token."""

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        token_ids, log_probs, _, _ = logprobs_lists
        self.logprobs.extend(zip(token_ids, log_probs, strict=True))


def keep_arrays(engine: Any, sequence_id: str) -> None:
    """Spare vLLM from making Python numbers of a whole vocabulary, which takes it some 40 ms a token.

    Args:
        engine: vLLM's `LLMEngine`.
        sequence_id: of a forced request that was just added. Where it is not found, it takes its time.
    """
    for state in reversed(engine.output_processor.request_states.values()):
        if state.external_req_id == sequence_id:
            state.logprobs_processor = ArrayLogprobs(**{**vars(state.logprobs_processor), "logprobs": []})
            return


def account_of(output: RequestOutput) -> dict[str, Any] | None:
    """What the connector says of a request that brought a plan in its sampling parameters; None if it says nothing."""
    account: dict[str, Any] | None = (output.kv_transfer_params or {}).get(PARAMS_KEY)
    return account


def log_probabilities(output: RequestOutput, vocabulary: int) -> torch.Tensor:
    """The distribution of a forced request's next token.

    Args:
        output: of a request from `forced_request`, finished.
        vocabulary: how many ids the model knows.

    Returns:
        [vocabulary] float32.

    Raises:
        BlendError: if vLLM gave it for a part of the vocabulary only.
    """
    given = output.outputs[0].logprobs
    row = np.full(vocabulary, np.nan, dtype=np.float32)
    if isinstance(given, FlatLogprobs):
        row[np.array(given.token_ids, dtype=np.int64)] = np.array(given.logprobs, dtype=np.float32)
    elif given:
        token_ids, log_probs = given[0]
        row[token_ids] = log_probs
    if np.isnan(row).any():
        raise BlendError(
            f"vLLM gave log-probabilities of {int((~np.isnan(row)).sum())} of {vocabulary} tokens; start the engine "
            "with max_logprobs=-1."
        )
    return torch.from_numpy(row)


def _with_tail(transfer: dict[str, Any], tokens: int) -> dict[str, Any]:
    if not tokens:
        return transfer
    params = BlendParams(**transfer[PARAMS_KEY])
    longer = (*params.segments, *segments_of([(tokens, False)]))
    return as_transfer_params(params.model_copy(update={"segments": longer, "question": params.question_index}))
