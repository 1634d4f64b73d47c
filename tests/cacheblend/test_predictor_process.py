"""`ProcessPredictor`: real processes that are stopped and killed while events pour in, and nobody waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cacheblend_samples import identity_of

from cacheblend.errors import BlendError
from cacheblend.protocols import CandidatesSeen, QuestionFinished, QuestionQueued, QuestionStarted, TokensGenerated
from cacheblend.scheduling.predictor_child import AdviceChanges
from cacheblend.scheduling.predictor_frames import FrameReader, FrameWriter, PredictorSpec
from cacheblend.scheduling.predictor_process import ProcessPredictor

A, B, C, D = (identity_of(i, tokens=600) for i in range(1, 5))
PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make():
    made = []

    def start(**arguments):
        made.append(ProcessPredictor(**arguments))
        return made[-1]

    yield start
    for predictor in made:
        predictor.close()


def wait_for(condition):
    """What `condition` says once it says something; a test that waits in vain fails here."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def serve(predictor, rounds):
    """As an engine does: a question after the other, and a look at the advice each step. Returns the steps done."""
    done = 0
    for number in range(rounds):
        name = f"q{number}"
        predictor.observe(QuestionQueued(name, (A, B), f"s{number % 7}"))
        predictor.observe(CandidatesSeen(name, (C,)))
        predictor.observe(QuestionStarted(name))
        for _ in range(10):
            predictor.observe(TokensGenerated(name, (1,)))
            predictor.advice(16)
            done += 1
        predictor.observe(QuestionFinished(name))
    return done


def test_advice_comes_back_with_the_chunks_that_events_named_most_confident_first(make):
    predictor = make()
    predictor.observe(QuestionQueued("1", (B, A), "s"))
    advice = wait_for(lambda: predictor.advice(16))
    assert [piece.chunk for piece in advice] == [B, A]
    assert all(piece.chunk is known for piece, known in zip(advice, (B, A), strict=True))
    assert predictor.dropped == predictor.restarts == 0
    assert predictor.advice_age_s < PATIENCE_S


def test_the_thread_is_woken_by_a_look_at_the_advice_and_not_by_what_is_observed(make, monkeypatch):
    predictor, woken = make(), []
    # The thread leaves what is observed where it is.
    monkeypatch.setattr(predictor._watch, "_take", list)
    monkeypatch.setattr(predictor._watch, "wake", lambda: woken.append(len(predictor._waiting)))
    predictor.observe(QuestionQueued("q", (A, B)))
    assert woken == []
    predictor.advice(4)
    assert woken == [1]


def test_the_limit_is_kept_and_what_it_left_out_comes_next(make):
    predictor = make()
    predictor.observe(QuestionQueued("1", (A, B, C), "s"))
    first = wait_for(lambda: predictor.advice(2))
    assert [piece.chunk for piece in first] == [A, B]
    assert [piece.chunk for piece in predictor.advice(2)] == [C]


def test_what_is_not_likely_any_more_is_taken_back(make):
    predictor = make()
    predictor.observe(QuestionQueued("1", (A,), "s"))
    wait_for(lambda: predictor.advice(16))
    predictor.observe(QuestionFinished("1"))
    # Sessions that ask once and never again: little is to be expected of this one, and it was popular long ago.
    for number in range(600):
        predictor.observe(QuestionQueued(f"o{number}", (), f"o{number}"))
        predictor.observe(QuestionFinished(f"o{number}"))
    taken_back = wait_for(lambda: [piece for piece in predictor.advice(16) if piece.confidence == 0])
    assert [piece.chunk for piece in taken_back] == [A]


@pytest.mark.parametrize("harm", [signal.SIGSTOP, signal.SIGKILL])
def test_serving_goes_on_beside_a_stopped_or_killed_process_and_advice_comes_again(make, harm):
    predictor = make(queue_size=256, silence_s=0.5)
    predictor.observe(QuestionQueued("early", (A,), "s"))
    wait_for(lambda: predictor.advice(16))
    harmed = predictor.pid
    os.kill(harmed, harm)
    assert serve(predictor, 3000) == 30_000
    assert wait_for(lambda: predictor.restarts) == 1
    wait_for(lambda: predictor.pid not in (None, harmed))
    assert not is_running(harmed)
    # It was queued before the harm and still is: the new process was told of it, without a new event.
    wait_for(lambda: A in [piece.chunk for piece in predictor.advice(99) if piece.confidence > 0.9])


def test_a_flood_is_dropped_and_counted_and_not_queued_without_bound(make):
    predictor = make(queue_size=100)
    wait_for(lambda: predictor.advice_age_s is not None)
    os.kill(predictor.pid, signal.SIGSTOP)
    for number in range(100_000):
        predictor.observe(QuestionQueued(f"q{number}", (A,), "s"))
    assert len(predictor._waiting) <= 100
    # What fits a pipe and one batch is on its way; the rest cannot be.
    assert predictor.dropped > 90_000


def test_old_advice_is_not_handed_out(make):
    predictor = make(stale_s=0.5)
    predictor.observe(QuestionQueued("1", (A,), "s"))
    wait_for(lambda: predictor.advice_age_s is not None and predictor._arrived)
    os.kill(predictor.pid, signal.SIGSTOP)
    wait_for(lambda: predictor.advice_age_s > 0.5)
    assert predictor.advice(16) == []


def test_a_process_that_ends_again_and_again_is_not_started_more_often_than_allowed(make):
    predictor = make(make=PredictorSpec("os:_exit", {"status": 3}), restarts_per_minute=2)
    wait_for(lambda: predictor.restarts == 2 and predictor.pid is None)
    # The third one waits until a minute has passed since the first; the backoff alone would be over in a second.
    assert serve(predictor, 100) == 1000
    time.sleep(1)
    assert predictor.restarts == 2
    assert predictor.pid is None
    assert predictor.advice(16) == []


def test_closing_leaves_no_process_also_not_a_stopped_one_and_ends_advice(make):
    running, stopped = make(), make()
    pids = [wait_for(lambda one=one: one.advice_age_s is not None and one.pid) for one in (running, stopped)]
    running.observe(QuestionQueued("1", (A,), "s"))
    os.kill(pids[1], signal.SIGSTOP)
    for predictor in (running, stopped):
        predictor.close()
        predictor.close()
        predictor.observe(QuestionQueued("2", (B,), "s"))
        assert predictor.advice(16) == []
        assert predictor.pid is None
    assert [is_running(pid) for pid in pids] == [False, False]


def test_the_process_ends_when_its_parent_is_killed_even_if_the_pipe_stays_open(tmp_path):
    code = """
import os, time
from cacheblend.scheduling.predictor_process import ProcessPredictor
predictor = ProcessPredictor()
while predictor.advice_age_s is None:
    time.sleep(0.01)
if not os.fork():
    # Holds the pipes open, as a forked worker of the engine would.
    time.sleep(100)
print(os.getpid(), predictor.pid, flush=True)
time.sleep(100)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as parent:
        try:
            _, child = map(int, parent.stdout.readline().split())
            assert is_running(child)
            parent.kill()
            wait_for(lambda: not is_running(child))
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_the_process_imports_no_torch():
    code = "import sys, cacheblend.scheduling.predictor_child as c; c.make_predictor(c.PredictorSpec()); "
    code += "print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_an_idle_process_uses_little_of_a_core(make):
    """In clock ticks of processor time, whatever else the machine does: 2 % of a core would be 4 in 2 s."""
    predictor = make()
    predictor.observe(QuestionQueued("1", (A, B, C), "s"))
    wait_for(lambda: predictor.advice(16))

    def ticks():
        fields = Path(f"/proc/{predictor.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(2)
    assert ticks() - before <= 0.03 * 2 * os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("wrong", [{"queue_size": 0}, {"restarts_per_minute": 0}])
def test_a_predictor_without_queue_or_restarts_is_refused(wrong):
    with pytest.raises(BlendError, match="queue of 1 event or more"):
        ProcessPredictor(**wrong)


class Said:
    """Advice about a stand-in."""

    def __init__(self, number, confidence):
        self.chunk, self.confidence = identity_of(0, tokens=1), confidence
        object.__setattr__(self.chunk, "token_ids", (number,))


def test_only_what_is_new_or_has_changed_is_said_and_what_holds_again_after_a_while():
    now = [0.0]
    changes = AdviceChanges(lambda: now[0])
    assert changes.of([Said(1, 0.9), Said(2, 0.5)]).pieces == ((1, 0.9), (2, 0.5))
    assert changes.of([Said(1, 0.91), Said(2, 0.5)]).pieces == ()
    assert changes.of([Said(1, 0.7), Said(2, 0.5)]).pieces == ((1, 0.7),)
    assert changes.of([Said(1, 0.7)]).pieces == ((2, 0.0),)
    now[0] = 1.5
    assert changes.of([Said(1, 0.7)]).pieces == ((1, 0.7),)


def test_messages_survive_pipes_that_take_and_give_pieces_of_them():
    source, sink = os.pipe()
    for end in (source, sink):
        os.set_blocking(end, False)
    writer, reader = FrameWriter(sink), FrameReader(source)
    sent = [("x" * 300_000, number) for number in range(3)]
    received = []
    for message in sent:
        writer.put(message)
        while writer.busy:
            writer.flush()
            received += reader.messages()
    assert received == sent
    assert not reader.ended
    os.close(sink)
    assert reader.messages() == []
    assert reader.ended
    os.close(source)
