"""How much of what requests demand is on the host in time: with advice from several predictors, and with none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cacheblend.protocols import SpeculativePredictor
from cacheblend.scheduling.session_predictor import SessionPredictor
from eval.errors import EvalError
from eval.statistics import Interval, bootstrap_mean
from eval.trace.advisers import NoAdviser, OracleAdviser, PopularityAdviser, RandomAdviser
from eval.trace.host_simulation import HostSimulation, Outcome, Serving
from eval.trace.workload import Workload
from kvstore.key import ChunkIdentity

EXPECTED_ORDER = ("oracle", "session", "popularity", "random", "none")
"""Predictors by the hit rate that they should have, best first; the first two may be equal."""


@dataclass(frozen=True, slots=True)
class PrefetchRow:
    """One predictor over all interleavings; intervals are 95 % bootstrap intervals of their mean.

    Attributes:
        predictor: its name, one of `EXPECTED_ORDER`.
        hit_rate: share of demanded bytes that were on the host in time, by cache or prefetch.
        prefetched: share of demanded bytes that were on the host because of a prefetch.
        late: chunks a run whose prefetch was in flight when they were demanded.
        wasted: bytes a run that were prefetched and not used.
        gain: hit rate above that of the next predictor in the order, paired by interleaving; None for the last.
    """

    predictor: str
    hit_rate: Interval
    prefetched: Interval
    late: Interval
    wasted: Interval
    gain: Interval | None


def run(
    workloads: Sequence[Workload],
    host_share: float = 0.25,
    serving: Serving | None = None,
    session_predictor: Callable[[], SpeculativePredictor] = SessionPredictor,
) -> tuple[PrefetchRow, ...]:
    """Serve each workload once with each predictor, and return a row a predictor in the expected order.

    Args:
        workloads: interleavings of the same sessions by different seeds, or streams drawn by different seeds.
        host_share: bytes of the host tier over bytes of all distinct documents used, where `serving` says nothing.
        serving: what serves; by default as `Serving` says, its answers drawn anew for each workload.
        session_predictor: makes the predictor that is compared with the others.

    Raises:
        EvalError: no workload, or a share that is not above 0.
    """
    if not workloads or not host_share > 0:
        raise EvalError(
            f"Prefetching needs at least one workload and a host share above 0, not {len(workloads)} and {host_share}."
        )
    outcomes: dict[str, list[Outcome]] = {name: [] for name in EXPECTED_ORDER}
    for seed, workload in enumerate(workloads):
        chosen = replace(serving or Serving(int(host_share * workload.distinct_bytes)), seed=seed)
        chunks = {
            document: ChunkIdentity("trace", (), (number,)) for number, document in enumerate(sorted(workload.tokens))
        }
        for name, predictor in _predictors(workload, chunks, seed, session_predictor).items():
            outcomes[name].append(HostSimulation(workload, chunks, predictor, chosen).run())
    return tuple(_row(place, outcomes) for place in range(len(EXPECTED_ORDER)))


def in_expected_order(rows: Sequence[PrefetchRow]) -> bool:
    """Whether mean hit rates are as expected: the oracle's at least the predictor's, the others' each below."""
    rates = {row.predictor: row.hit_rate.mean for row in rows}
    oracle, session, *others = (rates[name] for name in EXPECTED_ORDER)
    falling = [session, *others]
    return oracle >= session and all(more > less for more, less in pairwise(falling))


def table(rows: Sequence[PrefetchRow]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| predictor | hit rate | of it prefetched | late prefetches | wasted GB | gain over the next |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        gain = "" if row.gain is None else _text(row.gain, ".3f")
        cells = (
            row.predictor,
            _text(row.hit_rate, ".3f"),
            _text(row.prefetched, ".3f"),
            _text(row.late, ".1f"),
            _text(row.wasted, ".1f", 1e-9),
            gain,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _predictors(
    workload: Workload,
    chunks: Mapping[str, ChunkIdentity],
    seed: int,
    session_predictor: Callable[[], SpeculativePredictor],
) -> dict[str, SpeculativePredictor]:
    prompts = [tuple(chunks[document] for document in request.documents) for request in workload.requests]
    names = [f"request-{number}" for number in range(len(prompts))]
    return {
        "oracle": OracleAdviser(prompts, names),
        "session": session_predictor(),
        "popularity": PopularityAdviser(),
        "random": RandomAdviser(list(chunks.values()), seed),
        "none": NoAdviser(),
    }


def _row(place: int, outcomes: Mapping[str, Sequence[Outcome]]) -> PrefetchRow:
    name = EXPECTED_ORDER[place]
    own = outcomes[name]
    gain = None
    if place + 1 < len(EXPECTED_ORDER):
        following = outcomes[EXPECTED_ORDER[place + 1]]
        gain = bootstrap_mean([mine.hit_rate - others.hit_rate for mine, others in zip(own, following, strict=True)])
    return PrefetchRow(
        name,
        bootstrap_mean([outcome.hit_rate for outcome in own]),
        bootstrap_mean([outcome.prefetched / max(1, outcome.demanded) for outcome in own]),
        bootstrap_mean([float(outcome.late) for outcome in own]),
        bootstrap_mean([float(outcome.wasted) for outcome in own]),
        gain,
    )


def _text(interval: Interval, form: str, scale: float = 1.0) -> str:
    mean, low, high = (format(value * scale, form) for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"
