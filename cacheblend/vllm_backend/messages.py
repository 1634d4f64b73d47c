"""What the two halves of the connector tell one another, once a step each way. Plain values that pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from cacheblend.plan import BlendPlan
from cacheblend.protocols import BlendReport, Eviction
from cacheblend.scheduling.cost_model import CostModel
from cacheblend.selectors.given import LayerRows
from kvstore.errors import UnavailableReason
from kvstore.events import StoreEvent
from kvstore.key import ChunkIdentity, ChunkKey
from kvstore.tiers import Tier
from kvstore.transfer_values import TransferOrder, TransferResult


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """Fill a request's own pages with blended KV.

    Attributes:
        request_id: whose.
        plan: the effective plan, up to the end of the question.
        block_ids: the request's pages, covering at least rows 0 to `end`.
        start: rows before it are in the pages already (prefix cache).
        end: rows from it on are left to the engine.
    """

    request_id: str
    plan: BlendPlan
    block_ids: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CollectOrder:
    """Put the KV of a prompt's chunk into the store once this step's forward pass has written it.

    Attributes:
        request_id: whose.
        identity: the chunk; its prefix precedes it in the pages.
        block_ids: the request's pages.
    """

    request_id: str
    identity: ChunkIdentity
    block_ids: tuple[int, ...]


@dataclass
class StepOrders(KVConnectorMetadata):
    """From the scheduler's half to every worker.

    Attributes:
        step_id: counts the engine's steps from 1.
        evictions: chunks that leave a memory tier, before anything else happens.
        budgets: new byte budgets of memory tiers, after that.
        transfers: chunks to bring to a memory tier.
        blends: new blends, in the order they were admitted.
        cancels: requests whose blend nobody wants any more.
        collects: chunks whose KV this step completes.
        missed: chunks that were asked for and are in no tier that is known; a remote server may have them.
        idle: whether the step computes nothing, so that a worker may wait for a load instead of turning around.
    """

    step_id: int = 0
    evictions: tuple[Eviction, ...] = ()
    budgets: Mapping[Tier, int] = field(default_factory=dict)
    transfers: tuple[TransferOrder, ...] = ()
    blends: tuple[BlendOrder, ...] = ()
    cancels: tuple[str, ...] = ()
    collects: tuple[CollectOrder, ...] = ()
    missed: tuple[ChunkIdentity, ...] = ()
    idle: bool = False


@dataclass(frozen=True, slots=True)
class BlendDone:
    """A blend ended well.

    Attributes:
        report: what it did.
        layer_rows: the reusable rows recomputed, from layer to layer, so that it can be repeated.
        unavailable: chunks that could not be had after all, and were computed as fresh rows.
    """

    report: BlendReport
    layer_rows: LayerRows
    unavailable: dict[ChunkKey, str]


@dataclass(frozen=True, slots=True)
class BlendTimes:
    """How long a blend took, known once the device has finished it: on a GPU, some steps after it was told done.

    Attributes:
        parts_ms: milliseconds by stage.
        shared_by: requests that were blended together, and share them.
    """

    parts_ms: dict[str, float]
    shared_by: int


@dataclass(frozen=True, slots=True)
class Collected:
    """A chunk was taken from the pages: where it is kept, and why not on disk or nowhere."""

    key: ChunkKey
    on_disk: bool
    on_host: bool
    reason: UnavailableReason | None
    tokens: int
    nbytes: int


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler's half; `aggregate` joins the ranks'.

    Attributes:
        step_id: of the orders that were carried out.
        events: each rank's store events, in order.
        transfers: each rank's finished transfers.
        done: blends that ended well, as rank 0 tells; the others did the same.
        times: of blends that the device has finished; rank 0 alone tells.
        failed: blends that raised, and the error's name.
        collected: each rank's answers to orders to collect, by request.
        budgets: the byte budgets that all ranks have now, where one was to be changed.
        costs: what was measured at start, by the slowest rank; once.
    """

    step_id: int = 0
    events: list[tuple[int, StoreEvent]] = field(default_factory=list)
    transfers: list[tuple[int, TransferResult]] = field(default_factory=list)
    done: dict[str, BlendDone] = field(default_factory=dict)
    times: dict[str, BlendTimes] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    collected: dict[str, list[Collected]] = field(default_factory=dict)
    budgets: dict[Tier, int] = field(default_factory=dict)
    costs: CostModel | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """See `KVConnectorWorkerMetadata.aggregate`."""
        assert isinstance(other, WorkerReport)
        collected = {request_id: list(answers) for request_id, answers in self.collected.items()}
        for request_id, answers in other.collected.items():
            collected.setdefault(request_id, []).extend(answers)
        return WorkerReport(
            self.step_id,
            [*self.events, *other.events],
            [*self.transfers, *other.transfers],
            {**other.done, **self.done},
            {**other.times, **self.times},
            {**other.failed, **self.failed},
            collected,
            {tier: min(self.budgets.get(tier, n), n) for tier, n in {**self.budgets, **other.budgets}.items()},
            _slower(self.costs, other.costs),
        )


def _slower(one: CostModel | None, other: CostModel | None) -> CostModel | None:
    """Of two ranks' measurements, that of the rank which computes more slowly."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda costs: costs.prefill_rows_per_s)


def worst_of(answers: Sequence[Collected]) -> Collected:
    """What all ranks together made of one chunk: it is where every rank has it."""
    first = answers[0]
    reason = next((answer.reason for answer in answers if answer.reason is not None), None)
    return Collected(
        first.key,
        all(answer.on_disk for answer in answers),
        all(answer.on_host for answer in answers),
        reason,
        first.tokens,
        sum(answer.nbytes for answer in answers),
    )
