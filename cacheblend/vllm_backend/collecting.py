"""Requests that collect a chunk: when its KV is complete, and what the workers made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cacheblend.vllm_backend.messages import Collected, CollectOrder, worst_of
from cacheblend.vllm_backend.tracking import Collecting
from kvstore.key import ChunkIdentity


class CollectRequests:
    """Follows them from their arrival to their end."""

    def __init__(self) -> None:
        self._collecting: dict[str, Collecting] = {}

    def __len__(self) -> int:
        return len(self._collecting)

    def enter(self, request: Any, identity: ChunkIdentity) -> None:
        """vLLM's request will collect this chunk."""
        self._collecting[request.request_id] = Collecting(request, identity)

    def take_answers(self, answers: Mapping[str, Sequence[Collected]]) -> None:
        """What each rank made of the chunks it was to take, by request."""
        for request_id, told in answers.items():
            if request_id in self._collecting:
                self._collecting[request_id].result = worst_of(told)

    def finish(self, request: Any) -> Collecting | None:
        """The request ended; None if it does not collect."""
        return self._collecting.pop(request.request_id, None)

    def orders(self, output: Any) -> Iterator[CollectOrder]:
        """Chunks whose last row is computed in the step that vLLM has scheduled."""
        for new in output.scheduled_new_reqs:
            if new.req_id in self._collecting:
                self._collecting[new.req_id].block_ids = list(new.block_ids[0])
                yield from self._order(output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if request_id not in self._collecting:
                continue
            collecting, added = self._collecting[request_id], cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                collecting.block_ids = []
            collecting.block_ids.extend(added[0] if added is not None else ())
            yield from self._order(output, request_id, cached.num_computed_tokens[index])

    def _order(self, output: Any, request_id: str, computed: int) -> Iterator[CollectOrder]:
        collecting = self._collecting[request_id]
        prompt = collecting.request.num_prompt_tokens
        if not collecting.ordered and computed + output.num_scheduled_tokens[request_id] >= prompt:
            collecting.ordered = True
            yield CollectOrder(request_id, collecting.identity, tuple(collecting.block_ids))
