"""Keeps blended KV apart from exact KV in vLLM's prefix cache.

vLLM finds cached blocks by a chain of hashes over token ids. A blended block has the ids of an exact one and other KV,
so its hash must differ by everything that its KV depends on: which spans were reused, from which chunks, which rows
were recomputed. Blocks wholly before the first reused row are exact, and keep their ordinary hashes.

Two requests of the same plan share a namespace: the second one waits for the first one's blend and finds its blocks.
Which rows a selector chose is remembered with the namespace, so that a request that finds only part of the blocks
(some were evicted, or it was preempted) recomputes the same rows in the rest.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend.plan import BlendPlan, Span
from cacheblend.protocols import BlendReport
from cacheblend.selectors.base import Evidence
from cacheblend.selectors.given import GivenRowsSelector, LayerRows

CODE_VERSION = 1
"""Raised whenever the same plan would give other KV."""

NAMESPACES_KEPT = 2_048

_HASH_BYTES = 32
"""Of a block's hash, as vLLM's SHA-256 has; it takes any length."""


@dataclass
class Namespace:
    """The blocks of one effective plan.

    Attributes:
        plan_digest: of all that the KV depends on.
        salt: what the blocks' hashes start from; new whenever the namespace is.
        told_tokens: tokens at the prompt's start that the plan's digest tells, so all its requests have the same.
        leader: the request that blends for all who wait, if one does.
        layer_rows: the rows it recomputed; None until then.
        report: what it did.
    """

    plan_digest: str
    salt: str
    told_tokens: int
    leader: str | None = None
    layer_rows: LayerRows | None = None
    report: BlendReport | None = None


class Namespaces:
    """Namespaces by plan, those used last."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[str, Namespace] = OrderedDict()

    def of(self, plan: BlendPlan, own_salt: str | None = None) -> Namespace:
        """The namespace of a plan that reuses something, among requests that came with the same salt."""
        digest = _digest(plan, own_salt)
        namespace = self._by_digest.get(digest)
        if namespace is None:
            # The nonce makes blocks of a namespace that was dropped unreachable.
            salt = f"cacheblend:{digest}:{uuid.uuid4().hex}"
            namespace = Namespace(digest, salt, _told_spans(plan)[-1].end)
            self._by_digest[digest] = namespace
        self._by_digest.move_to_end(digest)
        while len(self._by_digest) > NAMESPACES_KEPT:
            self._by_digest.popitem(last=False)
        return namespace

    def drop(self, namespace: Namespace) -> None:
        """Its blocks are not what the plan says: nobody else may find them."""
        if self._by_digest.get(namespace.plan_digest) is namespace:
            del self._by_digest[namespace.plan_digest]


def enter(request: Any, namespace: Namespace, exact_blocks: int, hash_block: int) -> None:
    """Give a request that is not scheduled yet the hashes of a namespace.

    Args:
        request: vLLM's; its prompt begins as the namespace's plan does.
        namespace: where its blocks belong.
        exact_blocks: blocks at its start that hold exact KV.
        hash_block: tokens of a block.
    """
    exact = list(request.block_hashes[:exact_blocks])
    request.cache_salt = f"{request.cache_salt or ''}{namespace.salt}"
    # The salt stands for all ids of these blocks already: vLLM hashes only what follows, chained to them.
    request.block_hashes[:] = _hashes(request.cache_salt, namespace.told_tokens // hash_block)
    request.update_block_hashes()
    # The last hash stays salted even if its block is exact: those of blocks filled later are chained to it.
    kept = max(0, min(len(exact), len(request.block_hashes) - 1))
    request.block_hashes[:kept] = exact[:kept]


def leave(request: Any, own_salt: str | None) -> None:
    """Give a request its ordinary hashes back.

    Args:
        request: vLLM's.
        own_salt: what it came with.
    """
    request.cache_salt = own_salt
    request.block_hashes.clear()
    request.update_block_hashes()


def _hashes(salt: str, blocks: int) -> list[bytes]:
    """One hash for each of the first blocks, by place: hashing a block's ids costs as much as hundreds of these."""
    drawn = hashlib.shake_256(salt.encode()).digest(_HASH_BYTES * blocks)
    return [drawn[at : at + _HASH_BYTES] for at in range(0, len(drawn), _HASH_BYTES)]


def _told_spans(plan: BlendPlan) -> Sequence[Span]:
    """What the KV depends on: the question too, where the choice of rows does."""
    assert plan.selector is not None
    return plan.spans if plan.selector.needs(Evidence.ATTENTION) else plan.spans[:-1]


def _digest(plan: BlendPlan, own_salt: str | None) -> str:
    selector = plan.selector
    assert selector is not None
    described = {
        "version": CODE_VERSION,
        "salt": own_salt,
        "moves_rows": plan.moves_rows,
        "selector": [selector.spec, selector.layers if isinstance(selector, GivenRowsSelector) else None],
        # A key stands for its chunk's ids, and is no list of ids.
        "spans": [
            (s.start, s.end, s.segment.identity.key if s.segment.identity else s.segment.token_ids)
            for s in _told_spans(plan)
        ],
    }
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()
