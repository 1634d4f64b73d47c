from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from eval.errors import EvalError
from eval.trace.candidates import with_candidates
from eval.trace.recording import generate_recording, read_recording
from eval.trace.workload import KV_BYTES_PER_TOKEN, interleave, zipf


def prompt_of(texts: list[str], question: str) -> str:
    head = "Based on the following reference documents, answer the question at the end.\n\n"
    body = "\n\n".join(f"[Document {number}: {text}]" for number, text in enumerate(texts, start=1))
    return f"{head}{body}\n\nQuestion: {question}" if texts else f"Question: {question}"


def line_of(session: str, *turns: tuple[dict[str, str], str]) -> str:
    shown = [
        {"metadata": "", "turn": number, "document_ids": list(texts), "prompt": prompt_of([*texts.values()], question)}
        for number, (texts, question) in enumerate(turns, start=1)
    ]
    return json.dumps({"session_id": session, "domain": "towers", "turns": shown}, ensure_ascii=False)


LIGHT = "A lighthouse [old] says: [Document 9: none].\u2028Its lamp turns"
SEA = "The sea is salt"
TRACE = "\n".join(
    (
        line_of("s1", ({"light": LIGHT, "sea": SEA}, "What turns?"), ({"sea": SEA, "light": LIGHT}, "And then?")),
        line_of("s2", ({}, "hi"), ({"boat": "A boat is made of wood"}, "What is the boat made of?")),
    )
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE + "\n", encoding="utf-8")
    return path


class LetterEmbedder:
    """Counts letters: texts of like words are near."""

    name = fingerprint = "letters"
    dimension = 26

    def embed_passages(self, texts):
        counts = np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts], dtype=np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)

    def embed_documents(self, texts):
        return self.embed_passages(texts), np.arange(len(texts))


def test_a_recording_has_documents_in_prompt_order_their_texts_and_the_question(trace):
    recording = read_recording(trace)
    first, second = recording.sessions
    assert [turn.documents for turn in first.turns] == [("light", "sea"), ("sea", "light")]
    assert [turn.question for turn in first.turns] == ["What turns?", "And then?"]
    assert [turn.documents for turn in second.turns] == [(), ("boat",)]
    assert recording.texts["light"] == LIGHT
    assert recording.tokens["light"] == math.ceil(len(LIGHT) / 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no session"),
        ("{", "line 1: this is no session"),
        (json.dumps({"session_id": "s"}), "line 1: this is no session"),
        (json.dumps({"session_id": "s", "turns": [{"document_ids": [], "prompt": "hi"}]}), "has no 'Question:'"),
        (
            json.dumps({"session_id": "s", "turns": [{"document_ids": ["a", "b"], "prompt": prompt_of(["x"], "q")}]}),
            "holds 1 documents but names 2",
        ),
        (f"{TRACE}\n{line_of('s3', ({'sea': 'fresh'}, 'q'))}", "line 3: the document 'sea' has another text"),
        (f"{TRACE}\n{line_of('s1')}", "two sessions with one session_id"),
    ],
)
def test_a_file_of_another_shape_is_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EvalError, match=message):
        read_recording(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(EvalError, match="cannot be read"):
        read_recording(tmp_path / "none.jsonl")


def test_candidates_are_what_the_retriever_ranks_beside_the_prompt(trace):
    recording = with_candidates(read_recording(trace), LetterEmbedder())
    asked, boats = recording.sessions[0].turns[0], recording.sessions[1].turns
    assert asked.candidates == ("boat",)
    assert boats[0].candidates
    assert set(boats[1].candidates) == {"light", "sea"}


def test_an_interleaving_keeps_each_sessions_order_and_is_the_seeds():
    recording = generate_recording(6, seed=1)
    workload = interleave(recording, seed=3)
    arrivals = [request.arrival_s for request in workload.requests]
    assert arrivals == sorted(arrivals)
    for session in recording.sessions:
        own = [request for request in workload.requests if request.session == session.id]
        assert [request.turn for request in own] == list(range(1, len(session.turns) + 1))
        assert [request.documents for request in own] == [turn.documents for turn in session.turns]
        assert [request.candidates for request in own] == [turn.candidates for turn in session.turns]
    assert workload == interleave(recording, seed=3)
    assert workload.requests != interleave(recording, seed=4).requests
    sessions = [request.session for request in workload.requests]
    assert sum(one != other for one, other in itertools.pairwise(sessions)) > len(recording.sessions)


def test_times_that_are_not_above_zero_are_refused():
    with pytest.raises(EvalError, match="numbers above 0"):
        interleave(generate_recording(1, seed=0), seed=0, mean_think_s=0.0)


def test_generated_sessions_meet_their_documents_again_in_other_orders():
    recording = generate_recording(8, seed=0)
    pairs = [(one, other) for s in recording.sessions for one, other in itertools.pairwise(s.turns)]
    kept = [set(one.documents) & set(other.documents) for one, other in pairs]
    assert sum(map(bool, kept)) > 0.9 * len(pairs)
    reordered = [
        [document for document in one.documents if document in both]
        != [document for document in other.documents if document in both]
        for (one, other), both in zip(pairs, kept, strict=True)
        if len(both) > 2
    ]
    assert sum(reordered) > 0.5 * len(reordered)
    assert all(not set(turn.candidates) & set(turn.documents) for s in recording.sessions for turn in s.turns)
    assert recording == generate_recording(8, seed=0) != generate_recording(8, seed=1)


def test_zipf_draws_different_documents_and_the_first_ranks_most():
    workload = zipf(requests=400, documents=50, exponent=1.0, top_k=3, seed=0)
    assert all(len(set(request.documents)) == 3 for request in workload.requests)
    demanded = [document for request in workload.requests for document in request.documents]
    assert demanded.count("document-1") > 3 * demanded.count("document-20") > 0
    assert workload.distinct_bytes == sum(workload.tokens[name] for name in set(demanded)) * KV_BYTES_PER_TOKEN
    assert workload == zipf(400, 50, 1.0, 3, seed=0)


@pytest.mark.parametrize("numbers", [(0, 5, 1.0, 1), (1, 5, 1.0, 6), (1, 5, 1.0, 0), (1, 5, -1.0, 1)])
def test_traffic_that_cannot_be_drawn_is_refused(numbers):
    with pytest.raises(EvalError, match="are not possible"):
        zipf(*numbers, seed=0)
