"""Prefetching on a generated trace: who is better than whom, and that the simulation counts what it says."""

from __future__ import annotations

import random

import pytest

from cacheblend.protocols import Advice, QuestionQueued
from cacheblend.scheduling.session_predictor import SessionPredictor
from eval.errors import EvalError
from eval.trace.advisers import NoAdviser, OracleAdviser, PopularityAdviser, RandomAdviser
from eval.trace.host_simulation import HostSimulation, Serving
from eval.trace.prefetching import EXPECTED_ORDER, in_expected_order, run, table
from eval.trace.workload import KV_BYTES_PER_TOKEN, TraceRequest, Workload
from kvstore.key import ChunkIdentity

TOKENS = 256
SIZE = TOKENS * KV_BYTES_PER_TOKEN


def sessions_trace(seed, sessions=24, documents=300):
    """Sessions whose documents come back with 0.85 in another order; of their new ones, half are popular everywhere."""
    draw = random.Random(seed)
    popular = [f"popular-{rank}" for rank in range(30)]
    weights = [1 / (1 + rank) for rank in range(30)]
    requests, begin = [], 0.0
    for session in range(sessions):
        begin += draw.expovariate(1 / 2)
        arrival, held, coming = begin, [], []
        for turn in range(1, draw.randint(4, 8)):
            held = [document for document in held if draw.random() < 0.85]
            held += coming or [f"rare-{draw.randrange(documents)}"]
            held = list(dict.fromkeys(held))
            draw.shuffle(held)
            coming = [
                draw.choices(popular, weights)[0] if draw.random() < 0.5 else f"rare-{draw.randrange(documents)}"
                for _ in range(3)
            ]
            # The retriever ranks some of what the next turn brings among what no turn brings.
            candidates = [document for document in coming if draw.random() < 0.5 and document not in held]
            candidates += [f"rare-{draw.randrange(documents)}" for _ in range(3)]
            draw.shuffle(candidates)
            requests.append(TraceRequest(arrival, str(session), turn, tuple(held), tuple(dict.fromkeys(candidates))))
            arrival += draw.expovariate(1 / 15)
    requests.sort(key=lambda request: request.arrival_s)
    names = {name for request in requests for name in (*request.documents, *request.candidates)}
    return Workload(tuple(requests), dict.fromkeys(sorted(names), TOKENS))


@pytest.fixture(scope="module")
def rows():
    return run([sessions_trace(seed) for seed in range(3)], host_share=0.12)


def test_the_oracle_is_at_least_as_good_as_the_predictor_then_come_popularity_chance_and_no_advice(rows):
    assert [row.predictor for row in rows] == list(EXPECTED_ORDER)
    assert in_expected_order(rows), table(rows)


def test_the_predictor_is_better_than_popularity_on_every_interleaving(rows):
    gain = next(row.gain for row in rows if row.predictor == "session")
    assert gain.low > 0.01


def test_a_predictor_that_advises_nothing_useful_is_not_in_the_expected_order():
    """The order can be missed: with the least likely chunks advised as surely as the likeliest, it is."""

    class Upside(SessionPredictor):
        def advice(self, limit):
            likely = super().advice(10_000)
            return [Advice(piece.chunk, 1.0 - piece.confidence) for piece in reversed(likely)][:limit]

    rows = run([sessions_trace(0)], host_share=0.2, session_predictor=Upside)
    assert not in_expected_order(rows), table(rows)


def test_the_table_has_a_line_a_predictor_with_its_interval(rows):
    lines = table(rows).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in EXPECTED_ORDER]
    assert all(line.count("|") == 7 for line in lines)
    assert f"{rows[0].hit_rate.mean:.3f} [" in lines[2]


def test_no_workload_and_no_host_are_refused():
    with pytest.raises(EvalError, match="at least one workload"):
        run([])
    with pytest.raises(EvalError, match="host share above 0"):
        run([sessions_trace(0)], host_share=0.0)


def simulate(requests, predictor, host_chunks=10, **serving):
    requests = tuple(TraceRequest(arrival, session, 1, documents) for arrival, session, documents in requests)
    workload = Workload(requests, dict.fromkeys("abcdefgh", TOKENS))
    return HostSimulation(workload, CHUNKS, predictor, Serving(host_chunks * SIZE, **serving)).run()


CHUNKS = {name: ChunkIdentity("trace", (), (number,)) for number, name in enumerate("abcdefgh")}


class Always:
    """Gives the same advice whenever it is asked, after the first event."""

    def __init__(self, *names):
        self.pieces = [Advice(CHUNKS[name], 0.9) for name in names]

    def observe(self, event):
        pass

    def advice(self, limit):
        return self.pieces[:limit]


def test_what_stays_on_the_host_is_a_hit_of_the_cache_and_what_advice_brought_one_of_prefetching():
    requests = [(0.0, "s", "ab"), (50.0, "s", "abc")]
    plain = simulate(requests, NoAdviser())
    assert (plain.demanded, plain.cached, plain.prefetched) == (5 * SIZE, 2 * SIZE, 0)
    advised = simulate(requests, Always("c"))
    assert (advised.cached, advised.prefetched, advised.late, advised.wasted) == (2 * SIZE, SIZE, 0, 0)
    assert advised.hit_rate == pytest.approx(3 / 5)


def test_a_prefetch_in_flight_when_its_chunk_is_demanded_is_late_and_no_hit():
    load_s = SIZE / 1.2e9
    # The first request needs nothing, but its arrival brings the advice.
    late = simulate([(0.0, "s", ""), (load_s / 2, "t", "a")], Always("a"))
    assert (late.late, late.prefetched, late.cached) == (1, 0, 0)
    in_time = simulate([(0.0, "s", ""), (load_s * 2, "t", "a")], Always("a"))
    assert (in_time.late, in_time.prefetched) == (0, SIZE)


def test_what_advice_brought_in_vain_is_wasted_whether_it_left_or_is_left_over():
    assert simulate([(0.0, "s", "a")], Always("b", "c")).wasted == 2 * SIZE
    pushed_out = simulate([(0.0, "s", "a"), (9.0, "t", "defg"), (19.0, "u", "h")], Always("b"), host_chunks=2)
    assert pushed_out.wasted >= SIZE


def test_chunks_in_use_are_not_evicted_and_what_finds_no_room_is_served_all_the_same():
    outcome = simulate([(0.0, "s", "abcdef"), (0.0, "t", "ab")], NoAdviser(), host_chunks=2)
    assert outcome.demanded == 8 * SIZE
    assert outcome.hit_rate < 1


def test_questions_in_the_queue_are_prefetched_for_while_others_run():
    requests = [(0.0, "s", "ab"), (0.01, "t", "cd"), (0.02, "u", "ef")]
    assert simulate(requests, SessionPredictor(), running=1).prefetched == 4 * SIZE
    assert simulate(requests, NoAdviser(), running=1).prefetched == 0


def test_the_oracle_advises_what_comes_next_first_and_forgets_what_has_started():
    oracle = OracleAdviser([(CHUNKS["b"], CHUNKS["a"]), (CHUNKS["c"],)], ["r1", "r2"])
    assert [piece.chunk for piece in oracle.advice(9)] == [CHUNKS["b"], CHUNKS["a"], CHUNKS["c"]]
    assert [piece.chunk for piece in oracle.advice(1)] == [CHUNKS["b"]]


def test_popularity_and_chance_know_only_what_was_asked_and_what_there_is():
    popularity = PopularityAdviser()
    assert popularity.advice(9) == []
    for name, documents in (("1", "ab"), ("2", "b")):
        popularity.observe(QuestionQueued(name, tuple(CHUNKS[document] for document in documents)))
    assert popularity.advice(1) == [Advice(CHUNKS["b"], 1.0)]
    guesses = []
    for _ in range(2):
        chance = RandomAdviser(list(CHUNKS.values()), seed=3)
        chance.observe(QuestionQueued("1", ()))
        guesses.append(chance.advice(5))
    assert len(guesses[0]) == 5
    assert guesses[0] == guesses[1]
