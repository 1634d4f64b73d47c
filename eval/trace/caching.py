"""How many of the demanded bytes each policy of eviction has in a memory tier, beside what is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheblend.scheduling.cost_model import CostModel
from cacheblend.scheduling.session_predictor import SessionPredictor
from eval.errors import EvalError
from eval.statistics import Interval, bootstrap_mean, paired_bootstrap
from eval.trace.advice import Adviser
from eval.trace.clairvoyant import bound_hits, serve_clairvoyantly
from eval.trace.host_simulation import MEASURED_COSTS
from eval.trace.serving import CacheOutcome, PrefillSaving, Tally
from eval.trace.workload import Workload
from kvstore.eviction import EvictionPolicy, make_policy
from kvstore.key import ChunkKey
from kvstore.tiers import Tier

CAPACITY_SHARES = (0.05, 0.1, 0.2, 0.5)
"""Capacities compared, as shares of the bytes of all distinct documents used."""

POLICIES = ("lru", "gdsf", "s3fifo")
ADVISED = "gdsf, advised"
CLAIRVOYANT = "clairvoyant"
BOUND = "bound"


@dataclass(frozen=True, slots=True)
class CachingRow:
    """One policy at one capacity over all workloads; intervals are 95 % bootstrap intervals of the mean over them.

    Attributes:
        capacity_share: capacity over the bytes of all distinct documents used.
        policy: one of `POLICIES`, `ADVISED` (GDSF told what the session predictor expects, nothing prefetched),
            `CLAIRVOYANT` (`serve_clairvoyantly`) or `BOUND` (`bound_hits`).
        byte_hit_rate: share of the demanded bytes that were cached.
        chunk_hit_rate: share of the demanded documents that were cached.
        saved_s: seconds of prefill saved in a whole workload.
        byte_hit_gain: byte hit rate less LRU's on the same workload.
    """

    capacity_share: float
    policy: str
    byte_hit_rate: Interval
    chunk_hit_rate: Interval
    saved_s: Interval
    byte_hit_gain: Interval


def run(
    workloads: Sequence[Workload],
    capacity_shares: Sequence[float] = CAPACITY_SHARES,
    costs: CostModel = MEASURED_COSTS,
) -> tuple[CachingRow, ...]:
    """Serve every workload at every capacity with every policy; a row for each capacity and policy.

    Args:
        workloads: interleavings of the same sessions by different seeds, or streams drawn by different seeds.
        capacity_shares: capacities over the bytes of all distinct documents used.
        costs: what prefill and disk cost.

    Raises:
        EvalError: there is no workload, or a share is not above 0.
    """
    if not workloads or not all(share > 0 for share in capacity_shares):
        raise EvalError(
            f"Caching needs at least one workload and capacities above 0, not {len(workloads)} and {capacity_shares}."
        )
    return tuple(row for share in capacity_shares for row in _rows(workloads, share, costs))


def serve(
    workload: Workload, capacity: int, policy: EvictionPolicy, costs: CostModel, adviser: Adviser | None = None
) -> CacheOutcome:
    """Serve all requests from a cache of `capacity` bytes that `policy` orders, as a memory tier is.

    The adviser, if there is one, sees each request as it arrives and tells the policy what it expects. A request's
    documents are held while it is served; those that were not cached come in after it is counted, in prompt order.
    One for which there is no room beside what is held stays out.
    """
    tally = Tally(workload, PrefillSaving(costs))
    cached: set[str] = set()
    free = capacity
    for request in workload.requests:
        tally.count(request, cached)
        if adviser is not None:
            adviser.see(request, policy)
        for document in request.documents:
            policy.hold(ChunkKey(document))
            policy.touch(ChunkKey(document))
        for document in request.documents:
            if document not in cached:
                free += _make_room(workload, policy, cached, workload.nbytes(document) - free)
                if workload.nbytes(document) <= free:
                    policy.add(ChunkKey(document), workload.nbytes(document), _cost_s(workload, document, costs))
                    if adviser is not None:
                        adviser.entered(document, policy)
                    cached.add(document)
                    free -= workload.nbytes(document)
        for document in request.documents:
            policy.release(ChunkKey(document))
    return tally.outcome()


def _make_room(workload: Workload, policy: EvictionPolicy, cached: set[str], nbytes: int) -> int:
    """Evict what frees `nbytes`, nothing if that cannot be, and return the bytes freed."""
    victims = policy.victims(nbytes)
    for victim in victims:
        policy.remove(victim)
        cached.remove(victim)
    return sum(map(workload.nbytes, victims))


def _cost_s(workload: Workload, document: str, costs: CostModel) -> float:
    """Seconds to have a document again: from disk or by prefill, the cheaper."""
    reload_s = costs.reload_seconds(Tier.DISK, workload.nbytes(document))
    return min(reload_s, costs.prefill_seconds(workload.tokens[document], 0))


def _servers(costs: CostModel) -> dict[str, Callable[[Workload, int], CacheOutcome]]:
    """What serves a workload from a cache of so many bytes, by the name of its row."""
    saving = PrefillSaving(costs)

    def ordered_by(name: str) -> Callable[[Workload, int], CacheOutcome]:
        return lambda workload, capacity: serve(workload, capacity, make_policy(name), costs)

    def advised(workload: Workload, capacity: int) -> CacheOutcome:
        return serve(workload, capacity, make_policy("gdsf"), costs, Adviser(workload, SessionPredictor()))

    return {
        **{name: ordered_by(name) for name in POLICIES},
        ADVISED: advised,
        CLAIRVOYANT: lambda workload, capacity: serve_clairvoyantly(workload, capacity, saving),
        BOUND: lambda workload, capacity: bound_hits(workload, capacity, saving),
    }


def _rows(workloads: Sequence[Workload], share: float, costs: CostModel) -> list[CachingRow]:
    outcomes = {
        name: [serve_with(workload, int(share * workload.distinct_bytes)) for workload in workloads]
        for name, serve_with in _servers(costs).items()
    }
    lru = [outcome.byte_hit_rate for outcome in outcomes["lru"]]
    return [
        CachingRow(
            share,
            name,
            bootstrap_mean([outcome.byte_hit_rate for outcome in own]),
            bootstrap_mean([outcome.chunk_hit_rate for outcome in own]),
            bootstrap_mean([outcome.saved_s for outcome in own]),
            paired_bootstrap([outcome.byte_hit_rate for outcome in own], lru),
        )
        for name, own in outcomes.items()
    ]
