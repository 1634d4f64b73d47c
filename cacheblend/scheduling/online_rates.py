"""What a predictor learns while it runs: rates, waiting times and popularity, in bounded memory. Imports no torch."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore.key import ChunkIdentity, ChunkKey

Who = TypeVar("Who", bound=Hashable)

OCTAVES = 14
"""Waiting times are told apart by powers of two; from 2**(OCTAVES - 2) on they are alike."""


@dataclass(slots=True)
class Rate:
    """The share of forecasts that came true, with a Beta prior; the last few thousand count.

    Attributes:
        hits: of the prior, then of the prior and what was observed.
        misses: likewise.
        remembered: once this many are counted, all count half, so that the rate follows a change.
    """

    hits: float = 1.0
    misses: float = 1.0
    remembered: float = 4096.0

    @property
    def mean(self) -> float:
        """The posterior mean, between 0 and 1 exclusive."""
        return self.hits / (self.hits + self.misses)

    def add(self, hits: float, misses: float = 0.0) -> None:
        """Count forecasts that came true and forecasts that did not."""
        self.hits += hits
        self.misses += misses
        if self.hits + self.misses > self.remembered:
            self.hits /= 2
            self.misses /= 2


class WaitingTimes:
    """How long something takes, as the chance that it ends in each octave of the time already waited."""

    def __init__(self) -> None:
        self._rates = [Rate(0.02, 0.98) for _ in range(OCTAVES)]
        self._hazard: list[float] | None = None

    def survived(self, octave: int) -> None:
        """Something waited through the whole octave."""
        self._rates[octave].add(0, 1)
        self._hazard = None

    def ended(self, waited: int) -> None:
        """Something ended after waiting for so long; the octaves before are noted by `survived`."""
        self._rates[octave_of(waited)].add(1)
        self._hazard = None

    def soon(self, waited: int, within: int) -> float:
        """The chance, 0 to 1, that what has waited for so long ends within so much more."""
        return -math.expm1(self._cumulated(waited) - self._cumulated(waited + within))

    def _cumulated(self, waited: int) -> float:
        if self._hazard is None:
            self._hazard = [0.0]
            for rate in self._rates:
                self._hazard.append(self._hazard[-1] - math.log1p(-rate.mean))
        octave = octave_of(waited)
        begin, width = octave_begin(octave), max(1, octave_begin(octave))
        share = (waited - begin) / width
        return self._hazard[octave] + share * (self._hazard[octave + 1] - self._hazard[octave])


def octave_of(waited: int) -> int:
    """0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on; the last one has no end."""
    return min(waited.bit_length(), OCTAVES - 1)


def octave_begin(octave: int) -> int:
    """The smallest waiting time of an octave."""
    return 1 << (octave - 1) if octave else 0


class Returns(Generic[Who]):
    """Who left and may come back, and how soon they do; the clock is the caller's and never goes back.

    Those who do not come back are counted octave by octave as time passes them, amortised O(1) a departure.
    """

    def __init__(self) -> None:
        self._times = WaitingTimes()
        # By octave, in order of departure: who is first in one is the first to pass on to the next.
        self._away: list[OrderedDict[Who, int]] = [OrderedDict() for _ in range(OCTAVES)]
        self._octave: dict[Who, int] = {}

    def leave(self, who: Who, now: int) -> None:
        """They left at `now`; leaving again counts anew."""
        self.forget(who)
        self._away[0][who] = now
        self._octave[who] = 0

    def come_back(self, who: Who, now: int) -> None:
        """They are back; of those who had not left it counts as coming back at once."""
        octave = self._octave.pop(who, None)
        self._times.ended(0 if octave is None else now - self._away[octave].pop(who))

    def forget(self, who: Who) -> None:
        """Nobody waits for them any more."""
        octave = self._octave.pop(who, None)
        if octave is not None:
            del self._away[octave][who]

    def pass_time(self, now: int) -> None:
        """Count those who have stayed away through an octave."""
        for octave in range(OCTAVES - 1):
            away = self._away[octave]
            while away:
                who, left = next(iter(away.items()))
                if now - left < octave_begin(octave + 1):
                    break
                del away[who]
                self._times.survived(octave)
                self._away[octave + 1][who] = left
                self._octave[who] = octave + 1

    def soon(self, who: Who, now: int, within: int) -> float:
        """The chance that they come back within so much more; of one who has not left, as of one who leaves now."""
        octave = self._octave.get(who)
        waited = 0 if octave is None else now - self._away[octave][who]
        return self._times.soon(waited, within)


@dataclass(slots=True)
class _Counted:
    chunk: ChunkIdentity
    score: float = 0.0


@dataclass(slots=True)
class Popularity:
    """How often chunks were used of late, and how well that says which are used next.

    A use counts half once `half_life` later questions have been asked. The `top` most popular are kept apart, in O(top)
    a use; of all others at most `remembered` are known, the least recently used of them dropped first.
    """

    half_life: float = 512.0
    top: int = 64
    remembered: int = 4096
    _counted: OrderedDict[ChunkKey, _Counted] = field(default_factory=OrderedDict)
    _leaders: dict[ChunkKey, _Counted] = field(default_factory=dict)
    _ranked: list[_Counted] | None = None
    _rates: list[Rate] = field(default_factory=lambda: [Rate(0.5, 255) for _ in range(OCTAVES)])
    _weight: float = 1.0

    def use(self, chunks: Iterable[ChunkIdentity], known: Container[ChunkKey]) -> None:
        """A question uses these; what was popular before is judged by them, but for chunks in `known`.

        Of chunks in `known` it was to be expected for other reasons, so neither is their use counted.
        """
        chunks = [chunk for chunk in chunks if chunk.key not in known]
        self._judge({chunk.key for chunk in chunks}, known)
        # Later uses weigh more, instead of all earlier ones less; scores only grow, so no other chunk becomes a leader.
        self._weight *= 2 ** (1 / self.half_life)
        for chunk in chunks:
            counted = self._counted.setdefault(chunk.key, _Counted(chunk))
            counted.score += self._weight
            self._counted.move_to_end(chunk.key)
            self._lead(chunk.key, counted)
        while len(self._counted) > self.remembered:
            key, _ = self._counted.popitem(last=False)
            self._leaders.pop(key, None)
        if self._weight > 1e100:
            self._scale_down()
        self._ranked = None

    def likely(self, within: int) -> list[tuple[ChunkIdentity, float]]:
        """The most popular, first one first, with the chance that the next `within` questions use each."""
        chances = [1 - (1 - rate.mean) ** within for rate in self._rates]
        return [(counted.chunk, chances[octave_of(rank)]) for rank, counted in enumerate(self._in_order())]

    def _in_order(self) -> list[_Counted]:
        if self._ranked is None:
            self._ranked = sorted(self._leaders.values(), key=lambda counted: -counted.score)
        return self._ranked

    def _judge(self, used: set[ChunkKey], known: Container[ChunkKey]) -> None:
        for rank, counted in enumerate(self._in_order()):
            if counted.chunk.key not in known:
                hit = counted.chunk.key in used
                self._rates[octave_of(rank)].add(hit, not hit)

    def _lead(self, key: ChunkKey, counted: _Counted) -> None:
        self._leaders[key] = counted
        if len(self._leaders) > self.top:
            del self._leaders[min(self._leaders, key=lambda known: self._leaders[known].score)]

    def _scale_down(self) -> None:
        for counted in self._counted.values():
            counted.score /= self._weight
        self._weight = 1.0
