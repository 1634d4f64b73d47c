"""The connector's half in vLLM's scheduler: decides, and tells the workers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Policy
from cacheblend.protocols import KVCacheScheduler
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.step_log import log_residency
from cacheblend.vllm_backend import namespaces
from cacheblend.vllm_backend.arrivals import Arrival, Arrivals
from cacheblend.vllm_backend.directory import ChunkDirectory
from cacheblend.vllm_backend.messages import BlendDone, BlendOrder, CollectOrder, StepOrders, WorkerReport, worst_of
from cacheblend.vllm_backend.metrics import BlendStats
from cacheblend.vllm_backend.namespaces import Namespaces
from cacheblend.vllm_backend.planner import Planner
from cacheblend.vllm_backend.request_format import (
    PARAMS_KEY,
    BlendParams,
    CollectParams,
    check_prompt,
    parse_params,
)
from cacheblend.vllm_backend.results import collect_result, plan_result
from cacheblend.vllm_backend.settings import ConnectorSettings
from cacheblend.vllm_backend.tracking import Collecting, Phase, Tracked
from kvstore.errors import StoreError, UnavailableReason
from kvstore.key import ChunkIdentity, ChunkKey

logger = logging.getLogger(__name__)

ADMITTED_AHEAD = 32
"""Requests whose chunks are pinned and loaded before vLLM looks at them; later ones wait until it does."""

_SOUND = frozenset({UnavailableReason.HOST_BUDGET, UnavailableReason.CANCELLED})
"""Reasons a load did not happen although the chunk is sound: it is read through from disk."""


class SchedulerHalf:
    """Follows each request from its arrival to its end.

    Args:
        settings: of the connector.
        planner: lays prompts out.
        directory: which chunks there are.
        scheduler: decides what is loaded and evicted.
        ranks: tensor-parallel size.
        hash_block: tokens that one hash of vLLM's prefix cache stands for.
        prefix_caching: whether vLLM's prefix cache is on.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        planner: Planner,
        directory: ChunkDirectory,
        scheduler: KVCacheScheduler,
        ranks: int,
        hash_block: int,
        prefix_caching: bool,
    ) -> None:
        self._settings = settings
        self._planner = planner
        self._directory = directory
        self._scheduler = scheduler
        self._hash_block = hash_block
        self._prefix_caching = prefix_caching
        self._namespaces = Namespaces()
        self._arrivals = Arrivals(ranks)
        self._tracked: dict[str, Tracked] = {}
        self._collecting: dict[str, Collecting] = {}
        self._loads: list[ChunkIdentity] = []
        self._evictions: list[ChunkKey] = []
        self._blends: list[BlendOrder] = []
        self._cancels: list[str] = []
        self._steps = 0
        self.stats = BlendStats()

    def on_new_request(self, request: Any) -> None:
        """A request joined vLLM's queue."""
        try:
            params = parse_params(request.kv_transfer_params)
            if params is None:
                return
            reason = _why_plain(request, params)
            if reason is None:
                check_prompt(params, request.num_prompt_tokens)
                self._enter(request, params)
                return
        except (BlendError, StoreError) as error:
            logger.warning("request %s is prefilled as it is: %s", request.request_id, error)
            reason = f"bad_plan: {error}"
        tracked = Tracked(request, request.cache_salt, Policy.BLEND, None, reason=reason, phase=Phase.PLAIN)
        self._tracked[request.request_id] = tracked
        self._tell(tracked)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """See vLLM's `get_num_new_matched_tokens`: rows that a blend will fill beyond those in the prefix cache."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.start = computed
        if tracked.phase is Phase.PLAIN:
            return 0, False
        if tracked.phase is Phase.PLANNED and self._admitted() >= ADMITTED_AHEAD:
            # Those before it leave this phase, so its turn comes.
            return None, False
        if tracked.phase is not Phase.ADMITTED:
            before = tracked.namespace
            self._admit(tracked)
            if tracked.namespace is not before:
                # Its blocks have other hashes now: vLLM looks them up again in the next step.
                return None, False
        if tracked.phase is Phase.PLAIN:
            return 0, False
        if tracked.waiting_for or self._another_blends(tracked):
            return None, False
        if tracked.end <= computed:
            self._found_whole(tracked)
            return 0, False
        return tracked.end - computed, True

    def after_allocation(self, request: Any, block_ids: Sequence[int], external: int) -> None:
        """See vLLM's `update_state_after_alloc`: the request has pages for what was promised."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or external == 0 or tracked.plan is None:
            return
        tracked.phase = Phase.BLENDING
        plan, known = tracked.plan, self._known_rows(tracked)
        if tracked.namespace is not None and self._prefix_caching:
            tracked.namespace.leader = tracked.id
        if known is not None:
            plan = BlendPlan(plan.segments, GivenRowsSelector(known))
        self._blends.append(BlendOrder(tracked.id, plan, tuple(block_ids), tracked.start, tracked.end))

    def build_orders(self, output: Any) -> StepOrders:
        """What the workers do in the step that vLLM has scheduled."""
        self._steps += 1
        orders = StepOrders(
            self._steps,
            tuple(self._loads),
            tuple(self._evictions),
            tuple(self._blends),
            tuple(self._cancels),
            tuple(self._collect_orders(output)),
            idle=output.total_num_scheduled_tokens == 0,
        )
        for waiting in (self._loads, self._evictions, self._blends, self._cancels):
            waiting.clear()
        return orders

    def take_report(self, report: WorkerReport) -> None:
        """What the workers did."""
        if self._settings.early_accounts:
            self.stats.tell_step(report.step_id)
        for event in self._directory.follow(report.events):
            log_residency(report.step_id, event)
            self._scheduler.on_event(event)
        for arrival in self._arrivals.take(report.transfers):
            self._take_arrival(arrival)
        for request_id, done in report.done.items():
            if request_id in self._tracked:
                self._take_done(self._tracked[request_id], done)
        for request_id, error in report.failed.items():
            if request_id in self._tracked:
                self._take_failure(self._tracked[request_id], error)
        for request_id, answers in report.collected.items():
            if request_id in self._collecting:
                self._collecting[request_id].result = worst_of(answers)

    def finish(self, request: Any) -> dict[str, Any] | None:
        """A request ended: let go of everything it holds.

        Returns:
            Its account, for the result that vLLM gives to the client; None if it asked nothing of us.
        """
        collecting = self._collecting.pop(request.request_id, None)
        if collecting is not None:
            self.stats.count("collected", "", int(collecting.result is not None))
            return collect_result(collecting)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked.phase is Phase.BLENDING:
            self._cancels.append(tracked.id)
        self._stop_leading(tracked)
        self._scheduler.release(tracked.id)
        report = tracked.account()
        self.stats.take(report, tracked)
        return plan_result(tracked, report, self._settings.debug_rows)

    def pinned(self) -> int:
        """Pins held by all requests together."""
        return self._scheduler.pinned()

    def close(self) -> None:
        """Let the store's folder go."""
        self._directory.close()

    def _enter(self, request: Any, params: BlendParams | CollectParams) -> None:
        ids = request.prompt_token_ids
        if isinstance(params, CollectParams):
            self._collecting[request.request_id] = Collecting(request, self._planner.chunk(ids, params))
            return
        policy = self._planner.policy(params)
        tracked = Tracked(request, request.cache_salt, policy, None, phase=Phase.PLAIN)
        if policy is not Policy.FULL:
            tracked.asked = self._planner.plan(ids, params)
        self._tracked[request.request_id] = tracked
        if tracked.asked is None or not tracked.asked.reused:
            self._tell(tracked)
            return
        tracked.phase = Phase.PLANNED
        if self._admitted() < ADMITTED_AHEAD:
            self._admit(tracked)

    def _admitted(self) -> int:
        """Requests that hold pins and wait for pages."""
        return sum(tracked.phase is Phase.ADMITTED for tracked in self._tracked.values())

    def _admit(self, tracked: Tracked) -> None:
        """Fix the effective plan, pin its chunks and order what is missing from host memory."""
        assert tracked.asked is not None
        self._scheduler.release(tracked.id)
        admission = self._scheduler.admit(tracked.id, tracked.asked, tracked.policy)
        self._evictions.extend(eviction.key for eviction in admission.evictions)
        self._loads.extend(admission.loads)
        self._arrivals.expect(admission.loads)
        tracked.phase = Phase.ADMITTED
        tracked.reason = admission.reason
        # Chunks that are on their way for another request are waited for as well.
        tracked.waiting_for = self._arrivals.keys & set(admission.plan.keys)
        self._use(tracked, admission.plan)

    def _use(self, tracked: Tracked, plan: BlendPlan) -> None:
        """Make `plan` the request's effective one, and its blocks those of that plan."""
        if tracked.plan == plan and tracked.namespace is not None:
            return
        self._stop_leading(tracked)
        if tracked.plan is not None:
            # Rows that were chosen for another plan are not this one's.
            tracked.layer_rows = None
        tracked.plan = plan
        if not plan.reused:
            self._prefill_plainly(tracked)
            return
        if tracked.namespace is not None:
            namespaces.leave(tracked.request, tracked.own_salt)
        tracked.namespace = self._namespaces.of(plan, tracked.own_salt)
        if self._prefix_caching:
            namespaces.enter(tracked.request, tracked.namespace, tracked.first_reused // self._hash_block)

    def _prefill_plainly(self, tracked: Tracked, reason: str | None = None) -> None:
        self._stop_leading(tracked)
        self._scheduler.release(tracked.id)
        tracked.phase = Phase.PLAIN
        tracked.reason = reason or tracked.reason
        if tracked.namespace is not None:
            tracked.namespace = None
            namespaces.leave(tracked.request, tracked.own_salt)
        self._tell(tracked)

    def _tell(self, tracked: Tracked) -> None:
        """Send the account along as it is now, if somebody listens."""
        if self._settings.early_accounts:
            account = plan_result(tracked, tracked.account(), self._settings.debug_rows)
            self.stats.tell(tracked.id, account[PARAMS_KEY])

    def _another_blends(self, tracked: Tracked) -> bool:
        """Whether another request is filling the very blocks that this one will find."""
        namespace = tracked.namespace
        return namespace is not None and namespace.leader not in (None, tracked.id)

    def _stop_leading(self, tracked: Tracked) -> None:
        if tracked.namespace is not None and tracked.namespace.leader == tracked.id:
            tracked.namespace.leader = None

    def _known_rows(self, tracked: Tracked) -> Any:
        """The rows that a blend of this plan has chosen before, or this request's own; None the first time."""
        if tracked.layer_rows is not None:
            return tracked.layer_rows
        return tracked.namespace.layer_rows if tracked.namespace is not None else None

    def _found_whole(self, tracked: Tracked) -> None:
        """Every row that would be blended is in the prefix cache already."""
        self._scheduler.release(tracked.id)
        tracked.phase = Phase.BLENDED
        if tracked.report is None and tracked.namespace is not None and tracked.namespace.report is not None:
            # Nothing was loaded or computed for this one.
            tracked.report = replace(tracked.namespace.report, bytes_loaded={}, parts_ms={}, fallback_reasons=())
            tracked.layer_rows = tracked.namespace.layer_rows
        self._tell(tracked)

    def _take_arrival(self, arrival: Arrival) -> None:
        key, failed = arrival.chunk.key, arrival.failed
        gone = failed is not None and failed.reason not in _SOUND
        if gone:
            self._scheduler.on_unavailable(key)
            self._directory.lose(key)
        elif failed is not None:
            self._scheduler.on_not_loaded(key)
        for tracked in list(self._tracked.values()):
            if key not in tracked.waiting_for:
                continue
            tracked.waiting_for.discard(key)
            tracked.loaded_bytes.update(arrival.bytes_from)
            if gone and tracked.plan is not None and failed is not None and failed.reason is not None:
                self._use(tracked, tracked.plan.with_fresh({key: failed.reason.value}))

    def _take_done(self, tracked: Tracked, done: BlendDone) -> None:
        self._scheduler.release(tracked.id)
        namespace, plan = tracked.namespace, tracked.plan
        assert plan is not None
        assert plan.selector is not None
        report = done.report
        known = namespace.report if namespace is not None and self._known_rows(tracked) is not None else None
        if report.mode == "blend":
            report.selector = plan.selector.spec
            if known is not None:
                report.recomputed_ratio = known.recomputed_ratio
        tracked.phase = Phase.BLENDED
        tracked.report, tracked.layer_rows, tracked.shared_by = report, done.layer_rows, done.shared_by
        self._stop_leading(tracked)
        tracked.plan = plan.with_fresh(done.unavailable)
        self._tell(tracked)
        for key in done.unavailable:
            self._scheduler.on_unavailable(key)
            self._directory.lose(key)
        if namespace is None:
            return
        if done.unavailable:
            self._namespaces.drop(namespace)
            for other in self._tracked.values():
                if other.namespace is namespace and other.phase is Phase.ADMITTED and other.plan is not None:
                    # It waited for blocks that are not what its plan says.
                    self._use(other, other.plan.with_fresh(done.unavailable))
        elif namespace.layer_rows is None:
            namespace.layer_rows, namespace.report = done.layer_rows, report

    def _take_failure(self, tracked: Tracked, error: str) -> None:
        if tracked.plan is not None and tracked.start > tracked.first_reused:
            # Rows before `start` are the namespace's: none of them may stay under ordinary hashes. A request without
            # computed rows is looked up anew.
            tracked.request.num_computed_tokens = 0
        again = "blend_failed" if tracked.report is None else "blend_failed_after_preemption"
        self._prefill_plainly(tracked, f"{again}: {error}")

    def _collect_orders(self, output: Any) -> Iterable[CollectOrder]:
        """Chunks whose last row is computed in this step."""
        for new in output.scheduled_new_reqs:
            if new.req_id in self._collecting:
                self._collecting[new.req_id].block_ids = list(new.block_ids[0])
                yield from self._collect_order(output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if request_id not in self._collecting:
                continue
            collecting, added = self._collecting[request_id], cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                collecting.block_ids = []
            collecting.block_ids.extend(added[0] if added is not None else ())
            yield from self._collect_order(output, request_id, cached.num_computed_tokens[index])

    def _collect_order(self, output: Any, request_id: str, computed: int) -> Iterable[CollectOrder]:
        collecting = self._collecting[request_id]
        prompt = collecting.request.num_prompt_tokens
        if not collecting.ordered and computed + output.num_scheduled_tokens[request_id] >= prompt:
            collecting.ordered = True
            yield CollectOrder(request_id, collecting.identity, tuple(collecting.block_ids))


def _why_plain(request: Any, params: BlendParams | CollectParams) -> str | None:
    """Why a request cannot be blended, whatever its plan says."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "no_token_ids"
    if isinstance(params, BlendParams) and not params.segments:
        return "no_token_ids"
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "multimodal"
    if request.skip_reading_prefix_cache:
        return "prompt_logprobs"
    return None
