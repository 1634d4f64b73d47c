"""The groups of layers in which chunks' KV comes to a GPU, and in which short passes go through the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

LAYERS_TOGETHER = 4
"""Layers that are copied to the GPU with one call a chunk, at most; twice as many have room there."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that travel together.

    Attributes:
        first: the first one.
        layers: how many.
        turn: where in the ring the first one lies.
        after: index of the last group before it that lies where it will; -1 if there is none.
    """

    first: int
    layers: int
    turn: int
    after: int


def ring_layers(layers: int) -> int:
    """Layers of a model of `layers` that have room on their way."""
    return 2 * min(LAYERS_TOGETHER, layers)


@cache
def layer_groups(layers: int) -> tuple[LayerGroup, ...]:
    """The groups that a model of `layers` travels in, each in one piece of the ring."""
    groups: list[LayerGroup] = []
    first = turn = 0
    for size in group_sizes(layers):
        turn = turn if turn + size <= ring_layers(layers) else 0
        before = [i for i, g in enumerate(groups) if g.turn < turn + size and turn < g.turn + g.layers]
        groups.append(LayerGroup(first, size, turn, max(before, default=-1)))
        first, turn = first + size, turn + size
    return tuple(groups)


def group_sizes(layers: int) -> list[int]:
    """Layers of each group.

    Small ones come first, so that the first layer is soon there, and last, so that little is left to compute when the
    last bytes have come.
    """
    if layers <= 8:
        return [1] * layers
    middle = layers - 8
    rest = [middle % LAYERS_TOGETHER] if middle % LAYERS_TOGETHER else []
    return [1, 1, 2, *[LAYERS_TOGETHER] * (middle // LAYERS_TOGETHER), *rest, 2, 1, 1]
