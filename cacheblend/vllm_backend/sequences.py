"""What the runner knows of each sequence it handed to vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.outputs import RequestOutput

from cacheblend.protocols import BlendReport, FinishReason
from cacheblend.vllm_backend.prompts import OutgoingPrompt, report_of
from cacheblend.vllm_backend.request_format import PARAMS_KEY
from cacheblend.vllm_backend.sampling import finish_reason_of


@dataclass
class EngineSequence:
    """A prompt that vLLM serves.

    Attributes:
        id: the caller's name for it.
        prompt: as it was sent.
        when_prefilled: called once, with its first output or its end, whatever that is.
        output: vLLM's outputs so far, as one.
        finished: why it ended; None while it runs.
    """

    id: str
    prompt: OutgoingPrompt
    when_prefilled: Callable[[], None] | None = None
    output: RequestOutput | None = None
    finished: FinishReason | None = None

    def take(self, output: RequestOutput) -> tuple[int, ...]:
        """Add vLLM's next output.

        Returns:
            The new token ids of the first completion.
        """
        new = tuple(token for c in output.outputs if c.index == 0 for token in c.token_ids)
        if self.output is None:
            self.output = output
        else:
            known = self.output.kv_transfer_params
            self.output.add(output, aggregate=True)
            # Of several completions, each brings the account of its own prefill; the first one did the work.
            self.output.kv_transfer_params = known or output.kv_transfer_params
        if output.finished:
            self.finished = finish_reason_of(self._first_completion.finish_reason)
        self.prefilled()
        return new

    def end(self, reason: FinishReason) -> None:
        """Note an end that vLLM does not tell of."""
        self.finished = reason
        self.prefilled()

    def prefilled(self) -> None:
        """Call `when_prefilled` if that has not been done."""
        call, self.when_prefilled = self.when_prefilled, None
        if call is not None:
            call()

    def report(self, early: dict[str, Any] | None) -> BlendReport:
        """What its prefill did, as far as it was told.

        Args:
            early: its account as it came before its end, for one that the client ended; None if none came.
        """
        result = self.output.kv_transfer_params if self.output is not None else None
        if not result and early is not None:
            result = {PARAMS_KEY: early}
        return report_of(self.prompt, result)

    @property
    def _first_completion(self) -> Any:
        assert self.output is not None
        return min(self.output.outputs, key=lambda completion: completion.index)
