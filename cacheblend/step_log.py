"""Two logs that can be joined by step: where chunk KV went, and which tokens came. Imports no torch.

Both are written at DEBUG, to loggers of their own, with their fields as attributes of the record: `step_id` in both;
`key`, `tier`, `change` and `nbytes` in the residency log; `sequence_id` and `token_ids` in the token log. A change
carries the id of the step in whose course it was seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvstore.events import Evicted, Published, StoreEvent

RESIDENCY = logging.getLogger("cacheblend.residency")
TOKENS = logging.getLogger("cacheblend.tokens")


def log_residency(step_id: int, event: StoreEvent) -> None:
    """Log that a chunk can be served from a tier now, or no longer; other events are no change of residency."""
    if not RESIDENCY.isEnabledFor(logging.DEBUG) or not isinstance(event, Published | Evicted):
        return
    change = "published" if isinstance(event, Published) else "evicted"
    fields = {"step_id": step_id, "key": event.key, "tier": event.tier.value, "change": change, "nbytes": event.nbytes}
    RESIDENCY.debug("step %d: chunk %s %s in tier %s", step_id, event.key[:12], change, event.tier.value, extra=fields)


def log_tokens(step_id: int, tokens: Mapping[str, tuple[int, ...]]) -> None:
    """Log the new token ids of each sequence."""
    if not TOKENS.isEnabledFor(logging.DEBUG):
        return
    for sequence_id, ids in tokens.items():
        fields = {"step_id": step_id, "sequence_id": sequence_id, "token_ids": ids}
        TOKENS.debug("step %d: sequence %s got %s", step_id, sequence_id, ids, extra=fields)
