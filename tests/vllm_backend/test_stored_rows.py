"""Where rows of stored KV lie and go: the lines of all chunks tell what each row by itself says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.kernels.stored_rows import rows_of
from cacheblend.plan import Segment, SegmentRole, Span
from cacheblend.vllm_backend.layer_groups import ring_layers
from cacheblend.vllm_backend.placement import PlacedSpan, stored_spans
from cacheblend.vllm_backend.rows import PromptPages
from kvstore.chunk import ChunkKV
from kvstore.key import ChunkIdentity

LAYERS, HEADS, DIM, BLOCK = 3, 2, 4, 4
ROW = HEADS * DIM
CHUNKS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 8)), min_size=1, max_size=5)
"""Of each chunk its tokens, those of its prefix, and how many of its rows are in the pages already."""


def placed(chunks: list[tuple[int, int, int]], first_block: int = 1) -> list[PlacedSpan]:
    """The chunks one after another in a prompt, whose pages lie in descending order."""
    length = sum(tokens for tokens, _, _ in chunks)
    pages = PromptPages.of(range(length), range(first_block - 1 - -length // BLOCK, first_block - 1, -1), BLOCK)
    spans, start = [], 0
    for number, (tokens, prefix, there) in enumerate(chunks):
        ids = tuple(range(100 * number, 100 * number + tokens))
        identity = ChunkIdentity("model", tuple(range(prefix)), ids)
        span = Span(Segment(SegmentRole.CHUNK, ids, identity), start, start + tokens)
        chunk = ChunkKV(identity, torch.zeros(LAYERS, 2, tokens, HEADS, DIM))
        spans.append(PlacedSpan(pages, span, start + min(there, tokens - 1), chunk))
        start += tokens
    return spans


class InPool:
    """KV that stands for a chunk's in the GPU pool, in memory of its own."""

    is_cuda = True

    def __init__(self, kv: torch.Tensor) -> None:
        self.shape, self.data_ptr = kv.shape, kv.data_ptr
        self.kv = kv


@given(CHUNKS)
def test_a_row_of_the_pool_is_found_where_it_is_from_any_other_tensor(chunks):
    spans = [
        replace(span, chunk=SimpleNamespace(identity=span.chunk.identity, kv=InPool(span.chunk.kv)))
        for span in placed(chunks)
    ]
    buffer = torch.empty(3)
    rows, at = rows_of(stored_spans(spans, (), buffer), BLOCK), 0
    for span in spans:
        kv = span.chunk.kv
        for within in range(span.rows.start, span.rows.stop):
            address = buffer.data_ptr() + 4 * int(rows.first[at])
            assert address == kv.kv[0, 0, within].data_ptr()
            assert address + 4 * int(rows.model_step[at]) == kv.kv[1, 0, within].data_ptr()
            assert rows.layer_step[at] == rows.model_step[at]
            assert address + 4 * int(rows.kind_step[at]) == kv.kv[0, 1, within].data_ptr()
            assert rows.turn_step[at] == 0
            at += 1
    assert at == len(rows.first)


@given(CHUNKS, CHUNKS)
def test_every_row_is_found_in_its_chunks_ring_and_goes_to_its_own_slot(of_one_prompt, of_another):
    chunks = of_one_prompt + of_another
    spans = placed(of_one_prompt) + placed(of_another, 100)
    offsets = [0]
    for tokens, _, _ in chunks:
        offsets.append(offsets[-1] + ring_layers(LAYERS) * 2 * tokens * ROW)
    told = stored_spans(spans, offsets, torch.empty(offsets[-1]))
    assert told.longest == max(span.length for span in spans)
    rows = rows_of(told, BLOCK)
    at = 0
    for span, offset in zip(spans, offsets, strict=False):
        tokens = span.span.length
        for position in range(span.start, span.span.end):
            within = position - span.span.start
            assert rows.first[at] == offset + within * ROW
            assert rows.turn_step[at] == rows.layer_step[at] == 2 * tokens * ROW
            assert rows.kind_step[at] == tokens * ROW
            assert rows.model_step[at] == 0
            assert rows.old[at] == span.chunk.identity.base_position + within
            assert rows.new[at] == position
            assert rows.slots[at] == span.prompt.block_ids[position // BLOCK] * BLOCK + position % BLOCK
            at += 1
    assert at == len(rows.slots)
