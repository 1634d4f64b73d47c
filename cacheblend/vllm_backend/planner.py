"""From a request's ids and what it says about them to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend.plan import BlendPlan, Policy, Segment, SegmentRole
from cacheblend.selectors import Selector, make_selector
from cacheblend.selectors.given import GivenRowsSelector
from cacheblend.vllm_backend.directory import ChunkDirectory
from cacheblend.vllm_backend.request_format import BlendParams, CollectParams, fingerprint_in
from cacheblend.vllm_backend.settings import ConnectorSettings
from kvstore.errors import UnavailableReason
from kvstore.key import ChunkIdentity


class Planner:
    """Lays requests out.

    Args:
        fingerprint: of the model.
        directory: which chunks there are.
        settings: defaults of what a request leaves open.
        num_layers: of the model.
        max_model_len: positions that the engine knows.
        bos: the model's beginning-of-sequence id, None without one.
    """

    def __init__(
        self,
        fingerprint: str,
        directory: ChunkDirectory,
        settings: ConnectorSettings,
        num_layers: int,
        max_model_len: int,
        bos: int | None,
    ) -> None:
        self.fingerprint = fingerprint
        self._directory = directory
        self._settings = settings
        self._num_layers = num_layers
        self._max_model_len = max_model_len
        self._bos = bos
        self._missed: dict[ChunkIdentity, None] = {}
        self._checked(make_selector(settings.selector, settings.ratio))

    def policy(self, params: BlendParams) -> Policy:
        """The request's policy, or the default."""
        return params.policy or self._settings.policy

    def chunk(self, token_ids: Sequence[int], params: CollectParams) -> ChunkIdentity:
        """The chunk that a request collects."""
        fingerprint = fingerprint_in(self.fingerprint, params.namespace)
        prefix, chunk = tuple(token_ids[: params.collect]), tuple(token_ids[params.collect :])
        return self._directory.identity(fingerprint, prefix, chunk)

    def plan(self, token_ids: Sequence[int], params: BlendParams) -> BlendPlan:
        """The prompt up to its question; chunks that cannot be had are fresh, with the reason.

        Raises:
            BlendError: if the counts do not sum to the prompt or the selector cannot be made.
        """
        bounds = params.bounds(len(token_ids))
        selector = self._selector(params)
        question = params.question_index
        first_reused = params.first_reused_index
        prefixes = self._prefixes(token_ids, params, bounds)
        fingerprint = fingerprint_in(self.fingerprint, params.namespace)
        segments = []
        for index, (segment, (start, end)) in enumerate(zip(params.segments[:question], bounds, strict=False)):
            ids = tuple(token_ids[start:end])
            if segment.reuse:
                segments.append(self._chunk(fingerprint, ids, prefixes))
            else:
                role = SegmentRole.SYSTEM if index < first_reused else SegmentRole.CHUNK
                segments.append(Segment(role, ids))
        start, end = bounds[question]
        segments.append(Segment(SegmentRole.QUESTION, tuple(token_ids[start:end])))
        carry_drift = self._settings.carry_drift if params.carry_drift is None else params.carry_drift
        return BlendPlan(tuple(segments), selector, carry_drift, stored_by_us=params.namespace is None)

    def take_missed(self) -> tuple[ChunkIdentity, ...]:
        """Chunks that were not there since the last call, where a remote server could have them."""
        missed = tuple(self._missed)
        self._missed.clear()
        return missed

    def candidates(self, token_ids: Sequence[int], params: BlendParams) -> tuple[ChunkIdentity, ...]:
        """Those of the request's candidates that are there."""
        prefixes = self._prefixes(token_ids, params, params.bounds(len(token_ids)))
        fingerprint = fingerprint_in(self.fingerprint, params.namespace)
        chunks = (self._chunk(fingerprint, ids, prefixes) for ids in params.candidates if ids)
        return tuple(chunk.identity for chunk in chunks if chunk.identity is not None)

    def _prefixes(
        self, token_ids: Sequence[int], params: BlendParams, bounds: Sequence[tuple[int, int]]
    ) -> list[tuple[int, ...]]:
        """What a chunk may have been encoded behind, the wanted first.

        One encoded behind nothing is its own attention sink: it serves those only who have no prefix themselves.
        """
        end = bounds[params.first_reused_index][0] if params.prefix is None else params.prefix
        head = tuple(token_ids[:end])
        bos = [(self._bos,)] if self._bos is not None else []
        return list(dict.fromkeys([head + params.primer, head, *bos]))

    def _chunk(self, fingerprint: str, ids: tuple[int, ...], prefixes: list[tuple[int, ...]]) -> Segment:
        if fingerprint != self.fingerprint:
            # A namespace is filled for the prompt that follows, which must not wait for the next look at the folder.
            self._directory.look_again()
        # An engine for longer prompts may have stored it where this one's rotary tables do not reach.
        reached = [prefix for prefix in prefixes if len(prefix) + len(ids) <= self._max_model_len]
        identity, reason = self._directory.find(fingerprint, ids, reached)
        if identity is None and self._settings.remote is not None:
            self._missed.update(dict.fromkeys(ChunkIdentity(fingerprint, prefix, ids) for prefix in reached))
        if reason is UnavailableReason.OTHER_MODEL and fingerprint != self.fingerprint:
            # A namespace is part of the fingerprint: the model is the same, the chunk is not in it.
            reason = UnavailableReason.MISSING
        if identity is None:
            return Segment(SegmentRole.CHUNK, ids, reason=None if reason is None else reason.value)
        # Its own ids: the same object is compared sooner than an equal one.
        return Segment(SegmentRole.CHUNK, identity.token_ids, identity)

    def _selector(self, params: BlendParams) -> Selector:
        if params.rows is not None:
            return GivenRowsSelector.everywhere(params.rows)
        name, ratio = params.selector, params.asked_ratio
        if name is None:
            name = self._settings.selector
            ratio = self._settings.ratio if ratio is None else ratio
        return self._checked(make_selector(name, ratio, params.head_tokens, params.check_layers))

    def _checked(self, selector: Selector) -> Selector:
        """Refuse now what would fail in the middle of a blend."""
        selector.shares(self._num_layers)
        return selector
