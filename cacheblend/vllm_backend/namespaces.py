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
from dataclasses import dataclass
from typing import Any

from cacheblend.plan import BlendPlan
from cacheblend.protocols import BlendReport
from cacheblend.selectors.base import Evidence
from cacheblend.selectors.given import GivenRowsSelector, LayerRows

CODE_VERSION = 1
"""Raised whenever the same plan would give other KV."""

NAMESPACES_KEPT = 2_048


@dataclass
class Namespace:
    """The blocks of one effective plan.

    Attributes:
        plan_digest: of all that the KV depends on.
        salt: what the blocks' hashes start from; new whenever the namespace is.
        leader: the request that blends for all who wait, if one does.
        layer_rows: the rows it recomputed; None until then.
        report: what it did.
    """

    plan_digest: str
    salt: str
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
            namespace = Namespace(digest, f"cacheblend:{digest}:{uuid.uuid4().hex}")
            self._by_digest[digest] = namespace
        self._by_digest.move_to_end(digest)
        while len(self._by_digest) > NAMESPACES_KEPT:
            self._by_digest.popitem(last=False)
        return namespace

    def drop(self, namespace: Namespace) -> None:
        """Its blocks are not what the plan says: nobody else may find them."""
        if self._by_digest.get(namespace.plan_digest) is namespace:
            del self._by_digest[namespace.plan_digest]


def enter(request: Any, namespace: Namespace, exact_blocks: int) -> None:
    """Give a request that is not scheduled yet the hashes of a namespace.

    Args:
        request: vLLM's.
        namespace: where its blocks belong.
        exact_blocks: blocks at its start that hold exact KV.
    """
    exact = list(request.block_hashes[:exact_blocks])
    request.cache_salt = f"{request.cache_salt or ''}{namespace.salt}"
    _hash_again(request)
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
    _hash_again(request)


def _hash_again(request: Any) -> None:
    request.block_hashes.clear()
    request.update_block_hashes()


def _digest(plan: BlendPlan, own_salt: str | None) -> str:
    selector = plan.selector
    assert selector is not None
    spans = plan.spans if selector.evidence is Evidence.ATTENTION else plan.spans[:-1]
    described = {
        "version": CODE_VERSION,
        "salt": own_salt,
        "selector": [selector.spec, selector.layers if isinstance(selector, GivenRowsSelector) else None],
        "spans": [(s.start, s.end, s.segment.identity.key if s.segment.identity else None) for s in spans],
        # The question too, where the choice of rows depends on it.
        "ids": plan.token_ids[: spans[-1].end],
    }
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()
