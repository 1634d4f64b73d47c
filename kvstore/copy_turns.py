"""Turns on the way to a GPU: copies that follow one another leave room in between for everybody else's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

TURN_BYTES = 40 << 20
"""Bytes after which others come, at most: three quarters of a millisecond of a 55 GB/s link."""


class CopyPart(NamedTuple):
    """A piece of one of several copies.

    Attributes:
        copy: index of the copy.
        first: bytes of it that come before.
        nbytes: of the piece.
    """

    copy: int
    first: int
    nbytes: int


class CopyTurns:
    """Counts what is copied on a stream, and lets others copy in between.

    A GPU goes on with one stream's copies until it has to wait for something, and only then turns to another stream's,
    and to marks that are recorded behind these. On an H200 a table of 4 KiB came when all copies that were asked for
    elsewhere were done, up to 11.9 ms later; within the length of one turn where a kernel lay between the copies. That
    takes 0.4 % of the link's rate at `TURN_BYTES`, and 2.4 % at half of it.

    Args:
        stream: of a CUDA device.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._bytes = 0

    def of(self, sizes: Sequence[int]) -> Iterator[list[CopyPart]]:
        """Copies of so many bytes each, in turns; others come before a part that does not fit the turn that there is.

        Yields:
            The parts of each turn, to be asked for on the stream before the next turn is taken.
        """
        turn: list[CopyPart] = []
        for index, nbytes in enumerate(sizes):
            for first in range(0, nbytes, TURN_BYTES):
                part = CopyPart(index, first, min(TURN_BYTES, nbytes - first))
                if self._bytes + part.nbytes > TURN_BYTES:
                    if turn:
                        yield turn
                    turn = []
                    self._let_others_in()
                self._bytes += part.nbytes
                turn.append(part)
        if turn:
            yield turn

    def _let_others_in(self) -> None:
        self._bytes = 0
        with torch.cuda.stream(self._stream):
            leave_copy_queue(self._stream.device)


def leave_copy_queue(device: torch.device) -> None:
    """Queue a kernel that does nothing on the current stream.

    What is queued on the stream after a copy, marks and waits too, stands in line with the copies of all streams;
    behind a kernel it does not.
    """
    _scrap(device).neg_()


@cache
def _scrap(device: torch.device) -> torch.Tensor:
    # Whoever comes first may be in inference mode, and those after it need not be.
    with torch.inference_mode(False):
        return torch.zeros(1, device=device)
