"""Chunks that come to a GPU beside the computation: whatever order its streams run in, no layer is read too early.

The streams are played: what is asked of them is kept, and run one operation at a time in any order that their events
allow. So no GPU is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.vllm_backend import placement as module
from cacheblend.vllm_backend.layer_groups import layer_groups, ring_layers
from cacheblend.vllm_backend.placement import PlacementStreams, PoolPlacement, StagedPlacement


class Device:
    """A GPU's streams; `main` is the model's."""

    def __init__(self) -> None:
        self.main, self.copying, self.placing = Stream(self), Stream(self), Stream(self)
        self.current = self.main

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(
        self,
        choose: Callable[[int], int],
        most: int | None = None,
        order: Sequence[str] = ("main", "copying", "placing"),
    ) -> None:
        """What was asked for, all or `most` of it; `choose` says which of n streams that may go on does."""
        streams = [getattr(self, name) for name in order]
        while any(stream.queue for stream in streams) and most != 0:
            ready = [stream for stream in streams if stream.queue and stream.queue[0][0]()]
            assert ready, "the streams wait for one another"
            ready[choose(len(ready))].queue.popleft()[1]()
            most = None if most is None else most - 1


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def ask(self, work: Callable[[], None], may: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((may, work))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.device)
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        version = event.asked
        assert version, "an event that nobody has recorded holds nobody back"
        self.ask(lambda: None, lambda: event.reached >= version)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.asked = self.reached = 0

    def record(self, stream: Stream | None = None) -> None:
        self.asked += 1
        version = self.asked

        def reach() -> None:
            self.reached = version

        (stream or self.device.current).ask(reach)

    def wait(self) -> None:
        self.device.current.wait_event(self)

    def query(self) -> bool:
        assert self.asked, "an event that nobody has recorded tells nothing"
        return self.reached >= self.asked


class Chunks:
    """One chunk in each tier that is asked for, and the pages; both hold numbers of layers."""

    def __init__(self, layers: int, on_host: bool, in_pool: bool, patch: pytest.MonkeyPatch) -> None:
        self.device = device = Device()
        self.pages: dict[int, int] = {}
        self.ring: list[int | None] = [None] * ring_layers(layers)
        self.on_host = on_host
        cuda = SimpleNamespace(
            Event=lambda: Event(device), stream=device.on, current_stream=lambda _=None: device.current
        )
        patch.setattr(module, "torch", SimpleNamespace(cuda=cuda, empty=lambda *_, **__: Buffer()))
        patch.setattr(module, "placement_streams", lambda _: PlacementStreams(device.copying, device.placing))
        self.copies_asked = self.copies_asked_before_spans = self.launches = 0
        patch.setattr(module, "stored_spans", self.bring_spans)
        patch.setattr(module, "LayerCopies", lambda *_: SimpleNamespace(start=self.copy))
        patch.setattr(module, "PlacePass", lambda *_: SimpleNamespace(place=self.place))
        tiers = [False] * on_host + [True] * in_pool
        spans = [SimpleNamespace(chunk=SimpleNamespace(kv=Kv(range(layers), is_cuda))) for is_cuda in tiers]
        # Earlier work of the model still reads the pages.
        self.pages_are_free = False
        device.main.ask(self.free_pages)
        keys = SimpleNamespace(dtype=None, device=None)
        pages: Any = SimpleNamespace(layer_offsets=range(layers), keys=keys)
        rotary: Any = SimpleNamespace(all=None)
        given: Any = spans
        kind = StagedPlacement if on_host else PoolPlacement
        self.placement = kind(given, pages, rotary, torch.device("cuda"))

    def free_pages(self) -> None:
        self.pages_are_free = True

    def bring_spans(self, *_: Any) -> None:
        self.copies_asked_before_spans = self.copies_asked

    def copy(self, to: int, first: int, layers: int) -> None:
        def work() -> None:
            self.ring[to : to + layers] = range(first, first + layers)

        self.copies_asked += 1
        self.device.copying.ask(work)

    def place(self, turn: int, first: int, layers: int) -> None:
        def work() -> None:
            assert self.pages_are_free
            if self.on_host:
                assert self.ring[turn : turn + layers] == list(range(first, first + layers))
            self.pages.update((layer, layer) for layer in range(first, first + layers))

        self.launches += 1
        assert self.device.current is self.device.placing
        self.device.placing.ask(work)

    def compute(self, layer: int) -> None:
        """The model's next layer, whose pages must be there."""

        def work() -> None:
            assert self.pages[layer] == layer

        self.device.main.ask(work)


class Kv:
    """[layers, ..] of a chunk."""

    dtype = None

    def __init__(self, layers: range, is_cuda: bool) -> None:
        self.layers = layers
        self.is_cuda = is_cuda
        self.shape = (len(layers), 1)

    def numel(self) -> int:
        return len(self.layers)


class Buffer:
    device = None

    def record_stream(self, _: Any) -> None:
        """Nothing to record."""

    def split(self, sizes: list[int]) -> list[Any]:
        return [SimpleNamespace(view=lambda *_: None) for _ in sizes]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from([(True, False), (False, True), (True, True)]),
    st.sampled_from([1, 2, 5]),
    st.data(),
)
def test_no_layer_is_computed_before_it_is_placed_and_no_room_is_filled_before_it_is_free(layers, tiers, step, data):
    def choose(ready: int) -> int:
        return data.draw(st.integers(0, ready - 1)) if ready > 1 else 0

    with pytest.MonkeyPatch.context() as patch:
        chunks = Chunks(layers, *tiers, patch)
        for layer in range(0, layers, step):
            # The device goes on meanwhile, and the host may have time.
            chunks.device.run(choose, data.draw(st.sampled_from([0, 0, 3, 20])))
            if data.draw(st.integers(0, 9)) == 9:
                chunks.placement.start_all()
            last = min(layers, layer + step) - 1
            chunks.placement.ensure(last)
            assert not chunks.placement.is_due(last)
            for index in range(layer, last + 1):
                chunks.compute(index)
        chunks.placement.end()
        chunks.device.run(choose)
        assert set(chunks.pages) >= set(range(layers))


@pytest.mark.parametrize("tiers", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("ensured", [None, 0, 1, 9])
def test_a_blend_that_ends_early_leaves_nothing_on_its_way_into_pages_for_later_work(ensured, tiers, monkeypatch):
    chunks = Chunks(32, *tiers, monkeypatch)
    if ensured is not None:
        chunks.placement.ensure(ensured)
    chunks.placement.end()
    ended: list[set[int]] = []
    chunks.device.main.ask(lambda: ended.append(set(chunks.pages)))
    # The model's stream goes on whenever it may.
    chunks.device.run(lambda _: 0)
    assert ended == [set(chunks.pages)]


def test_every_layer_comes_into_the_pages_however_far_the_computation_is(monkeypatch):
    chunks = Chunks(32, True, False, monkeypatch)
    chunks.placement.ensure(0)
    chunks.placement.start_all()
    main = chunks.device.main
    while main.queue[0][0]():
        main.queue.popleft()[1]()
    # It stands still from here on, behind the work that had the pages before.
    chunks.device.run(lambda _: 0, order=("copying", "placing"))
    assert set(chunks.pages) == set(range(32))


def test_the_first_group_alone_is_started_before_the_model_has_something_to_do(monkeypatch):
    chunks = Chunks(32, True, False, monkeypatch)
    placed = [len(chunks.device.placing.queue)]
    for layer in range(3):
        chunks.placement.ensure(layer)
        chunks.device.run(lambda _: 0)
        placed.append(len(chunks.pages))
    groups = [group.layers for group in layer_groups(32)]
    assert placed[1:] == [groups[0], sum(groups[: 1 + module.STARTED_AHEAD]), sum(groups[: 2 + module.STARTED_AHEAD])]


def test_the_ring_is_filled_before_the_first_layer_is_wanted(monkeypatch):
    chunks = Chunks(32, True, False, monkeypatch)
    chunks.device.run(lambda _: 0)
    assert chunks.ring == list(range(ring_layers(32)))


def test_the_table_of_spans_is_made_while_the_first_copies_are_under_way(monkeypatch):
    chunks = Chunks(32, True, False, monkeypatch)
    chunks.device.run(lambda ready: 0, order=("placing", "main", "copying"))
    assert chunks.copies_asked_before_spans == module.COPIED_BEFORE_SPANS


@pytest.mark.parametrize("in_pool", [(False, False), (True, False), (True, True)])
def test_chunks_are_placed_as_where_they_are_asks_for(in_pool, monkeypatch):
    for name in ("PoolPlacement", "StagedPlacement", "PlainPlacement"):
        monkeypatch.setattr(module, name, lambda *given, name=name: (name, len(given[0])))
    spans: Any = [SimpleNamespace(chunk=SimpleNamespace(kv=Kv(range(1), is_cuda))) for is_cuda in in_pool]
    views, packed = [SimpleNamespace(views=())], [SimpleNamespace(views=None)]
    forward: Any = SimpleNamespace(device=torch.device("cuda"), pages=views, layers_pages=None, rotary=None)
    expected = "PoolPlacement" if in_pool == (True, True) else "StagedPlacement"
    assert module.place_layers(spans, forward) == (expected, 2)
    forward.pages = packed
    assert module.place_layers(spans, forward) == ("PlainPlacement", 2)


def test_chunks_of_the_pool_alone_are_placed_at_once_and_before_any_layer_is_wanted(monkeypatch):
    chunks = Chunks(32, False, True, monkeypatch)
    chunks.device.run(lambda _: 0)
    assert set(chunks.pages) == set(range(32))
    chunks.placement.ensure(31)
    chunks.device.run(lambda _: 0)
    assert chunks.launches == 1
