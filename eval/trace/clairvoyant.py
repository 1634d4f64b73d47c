"""What is possible with knowledge of the future: a cache that has it, and a bound that no cache can pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eval.trace.serving import CacheOutcome, PrefillSaving, Tally
from eval.trace.workload import Workload


@dataclass(frozen=True, slots=True)
class _Reuse:
    """From one use of a document to its next: the cache has the document all the while, or it is a miss.

    Attributes:
        nbytes: of the document.
        requests: that arrive until the next use, that one included.
        saved_s: seconds of prefill that the hit saves.
    """

    nbytes: int
    requests: int
    saved_s: float


def serve_clairvoyantly(workload: Workload, capacity: int, saving: PrefillSaving) -> CacheOutcome:
    """Serve with Belady's rule, by bytes: after each request the documents whose next use is soonest are kept.

    Candidates to keep are those in the cache and those of the request, so it may also decline what was just used.
    One that does not fit is passed over for the next. With documents of one size these are the most hits possible;
    with different sizes the best choice is NP-hard to find, and this is a heuristic: a cache that could be, so
    the optimum is at least this good and at most `bound_hits`.
    """
    next_use = _next_uses(workload)
    tally = Tally(workload, saving)
    kept: dict[str, float] = {}
    for number, request in enumerate(workload.requests):
        tally.count(request, kept.keys())
        kept |= {document: next_use[number, document] for document in request.documents}
        wanted = sorted((use, document) for document, use in kept.items() if use < len(workload.requests))
        kept, free = {}, capacity
        for use, document in wanted:
            if workload.nbytes(document) <= free:
                kept[document] = use
                free -= workload.nbytes(document)
    return tally.outcome()


def bound_hits(workload: Workload, capacity: int, saving: PrefillSaving) -> CacheOutcome:
    """Return what no cache can pass: each number is a bound by itself, and no one cache need reach all of them.

    A hit takes a document's bytes in the cache through all requests since its last use. A cache has `capacity`
    bytes through all requests; the bound hands these out where they give most (fractions allowed), and does not ask
    that they fit at each single moment (the relaxation of D. Berger et al., "Practical Bounds on Optimal Caching
    with Variable Object Sizes", 2018).
    """
    reuses = [reuse for reuse in _reuses(workload, saving) if reuse.nbytes <= capacity]
    room = float(capacity) * (len(workload.requests) - 1)

    def most(values: list[float]) -> float:
        """The largest sum of values for `room` byte-requests."""
        best, left = 0.0, room
        sizes = [float(reuse.nbytes * reuse.requests) for reuse in reuses]
        for value, size in sorted(zip(values, sizes, strict=True), key=lambda pair: pair[1] / pair[0]):
            share = min(1.0, left / size)
            best, left = best + share * value, left - share * size
        return best

    demanded = Tally(workload, saving)
    for request in workload.requests:
        demanded.count(request, ())
    total = demanded.outcome()
    return CacheOutcome(
        demanded_bytes=total.demanded_bytes,
        hit_bytes=most([float(reuse.nbytes) for reuse in reuses]),
        demanded_chunks=total.demanded_chunks,
        hit_chunks=most([1.0] * len(reuses)),
        saved_s=most([reuse.saved_s for reuse in reuses]),
    )


def _next_uses(workload: Workload) -> dict[tuple[int, str], int]:
    """The request that uses a document of a request next; the number of requests where none does."""
    following: dict[str, int] = {}
    found = {}
    for number in range(len(workload.requests) - 1, -1, -1):
        for document in workload.requests[number].documents:
            found[number, document] = following.get(document, len(workload.requests))
            following[document] = number
    return found


def _reuses(workload: Workload, saving: PrefillSaving) -> Iterator[_Reuse]:
    last: dict[str, int] = {}
    for number, request in enumerate(workload.requests):
        for document, saved_s in saving.of_prompt(workload, request):
            if document in last:
                yield _Reuse(workload.nbytes(document), number - last[document], saved_s)
            last[document] = number
