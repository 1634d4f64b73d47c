"""Sampling parameters: ours as vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind

from cacheblend.errors import BlendError
from cacheblend.protocols import FinishReason
from cacheblend.sampling_params import SamplingParams
from cacheblend.vllm_backend.engine_arguments import REFUSALS, one_line

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def vllm_sampling(
    sampling: SamplingParams | VllmSamplingParams,
    end_ids: Iterable[int],
    transfer: dict[str, Any] | None,
) -> VllmSamplingParams:
    """What a request is sent with: new tokens come step by step, and text is only made where stop strings need it.

    Args:
        sampling: ours, or vLLM's own, which is copied.
        end_ids: the model's end-of-sequence ids.
        transfer: `kv_transfer_params` to send along.

    Raises:
        BlendError: for a value that vLLM refuses.
    """
    try:
        params = sampling.clone() if isinstance(sampling, VllmSamplingParams) else _translated(sampling)
        if not params.ignore_eos:
            # Those of the generation configuration too, which vLLM is told not to take its defaults from.
            params.stop_token_ids = sorted({*(params.stop_token_ids or ()), *end_ids})
    except REFUSALS as error:
        raise BlendError(f"vLLM refuses the sampling parameters: {one_line(error)}.") from error
    params.output_kind = RequestOutputKind.DELTA
    if transfer is not None:
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": transfer}
    return params


def finish_reason_of(name: str | None) -> FinishReason:
    """Ours for vLLM's name of it; what is unknown is an error."""
    return _FINISH_REASONS.get(name or "", FinishReason.ERROR)


def _translated(sampling: SamplingParams) -> VllmSamplingParams:
    return VllmSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        detokenize=bool(sampling.stop),
    )
