"""What an arm's report shows."""

from dataclasses import dataclass

from eval.statistics import Interval


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm (a policy and selector at a ratio) over all questions.

    Attributes:
        name: shown in tables and plots, for example ``deviation 15 %``.
        f1: official F1, 0 to 1.
        em: official exact match, 0 to 1.
        token_f1: CacheBlend's token F1, 0 to 1.
        agreement: share of answers equal to full prefill's, 0 to 1.
        kl_first: KL(full || arm) at the first answer token, nats.
        kl_answer: the same, mean along full prefill's answer, nats.
        recomputed_ratio: recomputed reusable rows over reusable rows, 0 to 1.
        ttft_ms_p50: median time to first token, milliseconds.
        ttft_ms_p95: its 95th percentile, milliseconds.
        parts_ms: median milliseconds of each part of the time to first token, by name.
        full_ttft_share: median time to first token over that of full prefill.
        questions: number of questions behind the numbers.
    """

    name: str
    f1: Interval
    em: Interval
    token_f1: Interval
    agreement: Interval
    kl_first: Interval
    kl_answer: Interval
    recomputed_ratio: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    parts_ms: dict[str, float]
    full_ttft_share: float
    questions: int
