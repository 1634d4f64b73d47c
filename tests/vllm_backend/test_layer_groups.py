"""The order in which layers travel to a GPU: none is overwritten before it is placed, none is left out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.vllm_backend.layer_groups import (
    LAYERS_TOGETHER,
    layer_groups,
    ring_layers,
)

LAYERS = st.integers(1, 130)


@settings(max_examples=130, deadline=None)
@given(LAYERS)
def test_every_layer_travels_once_and_in_order(layers):
    travelled = [layer for group in layer_groups(layers) for layer in range(group.first, group.first + group.layers)]
    assert travelled == list(range(layers))


@settings(max_examples=130, deadline=None)
@given(LAYERS)
def test_a_group_that_is_copied_as_early_as_it_may_overwrites_nothing_that_is_not_placed(layers):
    groups = layer_groups(layers)
    ring: list[int | None] = [None] * ring_layers(layers)
    copied = 0
    for placed, group in enumerate(groups):
        while copied < len(groups) and groups[copied].after < placed:
            room = slice(groups[copied].turn, groups[copied].turn + groups[copied].layers)
            assert all(held is None or held < placed for held in ring[room])
            assert len(ring[room]) == groups[copied].layers
            ring[room] = [copied] * groups[copied].layers
            copied += 1
        assert ring[group.turn : group.turn + group.layers] == [placed] * group.layers
    assert copied == len(groups)


@settings(max_examples=130, deadline=None)
@given(LAYERS)
def test_the_next_group_may_always_be_copied_while_one_is_placed(layers):
    """Nothing waits for the group just before it, and the ring is filled at the start."""
    groups = layer_groups(layers)
    assert all(group.after <= max(index - 2, -1) for index, group in enumerate(groups))
    at_once = sum(group.layers for group in groups if group.after < 0)
    assert at_once > min(LAYERS_TOGETHER, layers - 1)
