"""The connector's half in vLLM's scheduler: decides, and tells the workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cacheblend.errors import BlendError
from cacheblend.plan import BlendPlan, Policy
from cacheblend.protocols import CandidatesSeen, QuestionFinished, QuestionQueued, QuestionStarted, TokensGenerated
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.step_log import log_residency
from cacheblend.vllm_backend import namespaces
from cacheblend.vllm_backend.arrivals import Arrival
from cacheblend.vllm_backend.collecting import CollectRequests
from cacheblend.vllm_backend.messages import BlendDone, BlendOrder, BlendTimes, StepOrders, WorkerReport
from cacheblend.vllm_backend.metrics import BlendStats
from cacheblend.vllm_backend.namespaces import Namespaces
from cacheblend.vllm_backend.planner import Planner
from cacheblend.vllm_backend.request_format import (
    PARAMS_KEY,
    BlendParams,
    BudgetParams,
    CollectParams,
    Params,
    check_prompt,
    parse_params,
)
from cacheblend.vllm_backend.results import budget_result, collect_result, plan_result
from cacheblend.vllm_backend.settings import ConnectorSettings
from cacheblend.vllm_backend.tracking import Phase, Tracked
from cacheblend.vllm_backend.traffic import SOUND, ChunkTraffic
from kvstore.errors import StoreError
from kvstore.tiers import Tier

logger = logging.getLogger(__name__)

ADMITTED_AHEAD = 32
"""Requests whose chunks are pinned and loaded before vLLM looks at them; later ones wait until it does."""


class SchedulerHalf:
    """Follows each request from its arrival to its end.

    Args:
        settings: of the connector.
        planner: lays prompts out.
        traffic: decides what is moved and evicted, and follows it.
        hash_block: tokens that one hash of vLLM's prefix cache stands for.
        prefix_caching: whether vLLM's prefix cache is on.
        stats: counts, for vLLM's metrics.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        planner: Planner,
        traffic: ChunkTraffic,
        hash_block: int,
        prefix_caching: bool,
        stats: BlendStats,
    ) -> None:
        self._settings = settings
        self._planner = planner
        self._traffic = traffic
        self._hash_block = hash_block
        self._prefix_caching = prefix_caching
        self._namespaces = Namespaces()
        self._tracked: dict[str, Tracked] = {}
        self._collecting = CollectRequests()
        self._budgets: dict[Tier, int] = {}
        self._blends: list[BlendOrder] = []
        self._cancels: list[str] = []
        self._budget_requests: set[str] = set()
        self._steps = 0
        self.stats = stats

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
        self._traffic.observe(QuestionStarted(tracked.id))
        plan, known = tracked.plan, self._known_rows(tracked)
        if tracked.namespace is not None and self._prefix_caching:
            tracked.namespace.leader = tracked.id
        if known is not None and plan.chunks_read:
            # Rows that are given would be placed first, all of them too: that they are all only their selector says.
            plan = replace(plan, selector=GivenRowsSelector(known))
        self._blends.append(BlendOrder(tracked.id, plan, tuple(block_ids), tracked.start, tracked.end))

    def build_orders(self, output: Any) -> StepOrders:
        """What the workers do in the step that vLLM has scheduled."""
        self._steps += 1
        self._tell_of_tokens(output)
        evictions, transfers = self._traffic.take_orders()
        orders = StepOrders(
            self._steps,
            evictions,
            dict(self._budgets),
            transfers,
            tuple(self._blends),
            tuple(self._cancels),
            tuple(self._collecting.orders(output)),
            self._planner.take_missed(),
            idle=output.total_num_scheduled_tokens == 0,
        )
        for waiting in (self._budgets, self._blends, self._cancels):
            waiting.clear()
        return orders

    def take_report(self, report: WorkerReport) -> None:
        """What the workers did."""
        if self._settings.early_accounts:
            self.stats.tell_step(report.step_id)
        if report.costs is not None:
            self._traffic.calibrate(report.costs)
        for event in self._traffic.take_events(report.events):
            log_residency(report.step_id, event)
        for arrival in self._traffic.take_transfers(report.transfers):
            self._take_arrival(arrival)
        for tier, nbytes in report.budgets.items():
            self._traffic.set_budget(tier, nbytes)
        for request_id, done in report.done.items():
            if request_id in self._tracked:
                self._take_done(self._tracked[request_id], done)
        for request_id, times in report.times.items():
            self.stats.take_times(times)
            if request_id in self._tracked:
                self._take_times(self._tracked[request_id], times)
        for request_id, error in report.failed.items():
            if request_id in self._tracked:
                self._take_failure(self._tracked[request_id], error)
        self._collecting.take_answers(report.collected)

    def finish(self, request: Any) -> dict[str, Any] | None:
        """A request ended: let go of everything it holds.

        Returns:
            Its account, for the result that vLLM gives to the client; None if it asked nothing of us.
        """
        collecting = self._collecting.finish(request)
        if collecting is not None:
            self.stats.count("collected", "", int(collecting.result is not None))
            return collect_result(collecting)
        if request.request_id in self._budget_requests:
            self._budget_requests.discard(request.request_id)
            return budget_result(self._traffic.budgets())
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked.phase is Phase.BLENDING:
            self._cancels.append(tracked.id)
        self._stop_leading(tracked)
        self._traffic.release(tracked.id)
        self._traffic.observe(QuestionFinished(tracked.id))
        report = tracked.account()
        self.stats.take(report, tracked)
        return plan_result(tracked, report, self._settings.debug_rows)

    def pinned(self) -> int:
        """Pins held by all requests together."""
        return self._traffic.pinned()

    def close(self) -> None:
        """Let the store's folder and the predictor go."""
        self._traffic.close()

    def _enter(self, request: Any, params: Params) -> None:
        ids = request.prompt_token_ids
        if isinstance(params, BudgetParams):
            self._change_budgets(request, params)
            return
        if isinstance(params, CollectParams):
            self._collecting.enter(request, self._planner.chunk(ids, params))
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
        self._traffic.observe(QuestionQueued(tracked.id, tracked.asked.chunks_read, params.session))
        if params.candidates:
            self._traffic.observe(CandidatesSeen(tracked.id, self._planner.candidates(ids, params)))
        if self._admitted() < ADMITTED_AHEAD:
            self._admit(tracked)

    def _change_budgets(self, request: Any, params: BudgetParams) -> None:
        """Order new byte budgets, if the operator lets requests do that; the answer says which hold afterwards."""
        self._budget_requests.add(request.request_id)
        if not self._settings.accept_budgets:
            logger.warning("request %s may not change budgets: `accept_budgets` is off", request.request_id)
            return
        held = self._traffic.budgets()
        for name, nbytes in params.budgets.items():
            tier = Tier(name)
            if tier not in held:
                logger.warning("the workers have no tier %s whose budget could change", name)
                continue
            if nbytes < held[tier]:
                # A larger one counts when the workers have found the memory for it.
                self._traffic.set_budget(tier, nbytes)
            self._budgets[tier] = nbytes

    def _tell_of_tokens(self, output: Any) -> None:
        """Tell the predictor of each token of the requests that brought a plan."""
        for request_id in output.scheduled_cached_reqs.req_ids:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.request.num_output_tokens:
                self._traffic.observe(TokensGenerated(request_id, tuple(tracked.request.output_token_ids[-1:])))

    def _admitted(self) -> int:
        """Requests that hold pins and wait for pages."""
        return sum(tracked.phase is Phase.ADMITTED for tracked in self._tracked.values())

    def _admit(self, tracked: Tracked) -> None:
        """Fix the effective plan, pin the chunks it reads and order those missing from host memory."""
        assert tracked.asked is not None
        self._traffic.release(tracked.id)
        admission, tracked.waiting_for = self._traffic.admit(tracked.id, tracked.asked, tracked.policy)
        tracked.phase = Phase.ADMITTED
        tracked.reason = admission.reason
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
            exact = tracked.first_reused // self._hash_block
            namespaces.enter(tracked.request, tracked.namespace, exact, self._hash_block)

    def _prefill_plainly(self, tracked: Tracked, reason: str | None = None) -> None:
        self._stop_leading(tracked)
        self._traffic.release(tracked.id)
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
        self._traffic.release(tracked.id)
        tracked.phase = Phase.BLENDED
        if tracked.report is None and tracked.namespace is not None and tracked.namespace.report is not None:
            # Nothing was loaded or computed for this one.
            tracked.report = replace(tracked.namespace.report, bytes_loaded={}, parts_ms={}, fallback_reasons=())
            tracked.layer_rows = tracked.namespace.layer_rows
        self._tell(tracked)

    def _take_arrival(self, arrival: Arrival) -> None:
        key, failed = arrival.chunk.key, arrival.failed
        gone = failed is not None and failed.reason not in SOUND
        for tracked in list(self._tracked.values()):
            if key not in tracked.waiting_for:
                continue
            tracked.waiting_for.discard(key)
            tracked.loaded_bytes.update(arrival.bytes_from)
            if gone and tracked.plan is not None and failed is not None and failed.reason is not None:
                self._use(tracked, tracked.plan.with_fresh({key: failed.reason.value}))

    def _take_done(self, tracked: Tracked, done: BlendDone) -> None:
        self._traffic.release(tracked.id)
        namespace, plan = tracked.namespace, tracked.plan
        assert plan is not None
        assert plan.selector is not None
        report = done.report
        known = namespace.report if namespace is not None and self._known_rows(tracked) is not None else None
        if report.mode == "blend":
            report.selector = plan.rule
            if known is not None:
                report.recomputed_ratio = known.recomputed_ratio
        tracked.phase = Phase.BLENDED
        tracked.report, tracked.layer_rows = report, done.layer_rows
        self._stop_leading(tracked)
        tracked.plan = plan.with_fresh(done.unavailable)
        self._tell(tracked)
        for key in done.unavailable:
            self._traffic.lose(key)
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

    def _take_times(self, tracked: Tracked, times: BlendTimes) -> None:
        if tracked.report is not None:
            tracked.report.parts_ms = times.parts_ms
            self._tell(tracked)

    def _take_failure(self, tracked: Tracked, error: str) -> None:
        if tracked.plan is not None and tracked.start > tracked.first_reused:
            # Rows before `start` are the namespace's: none of them may stay under ordinary hashes. A request without
            # computed rows is looked up anew.
            tracked.request.num_computed_tokens = 0
        again = "blend_failed" if tracked.report is None else "blend_failed_after_preemption"
        self._prefill_plainly(tracked, f"{again}: {error}")


def _why_plain(request: Any, params: Params) -> str | None:
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
