from __future__ import annotations

import itertools
import json
import random

import pytest
from typer.testing import CliRunner

from cacheblend.scheduling.cost_model import CostModel
from eval.errors import EvalError
from eval.trace.__main__ import app
from eval.trace.caching import ADVISED, BOUND, CLAIRVOYANT, POLICIES, run, serve
from eval.trace.clairvoyant import bound_hits, serve_clairvoyantly
from eval.trace.recording import generate_recording
from eval.trace.serving import PrefillSaving
from eval.trace.workload import KV_BYTES_PER_TOKEN, TraceRequest, Workload, interleave, zipf
from kvstore.eviction import make_policy
from kvstore.tiers import Tier

COSTS = CostModel({Tier.DISK: 1e9}, {}, prefill_rows_per_s=1_000.0, prefill_rows_squared_s=1e-6)
SAVING = PrefillSaving(COSTS)


def workload_of(prompts: list[str], **tokens: int) -> Workload:
    """One request a string, one document a letter."""
    requests = tuple(TraceRequest(float(n), "s", n + 1, tuple(prompt)) for n, prompt in enumerate(prompts))
    return Workload(requests, {letter: tokens.get(letter, 1) for letter in set("".join(prompts))})


def tokens_of(count: int) -> int:
    return count * KV_BYTES_PER_TOKEN


def best_hits(workload: Workload, capacity: int) -> int:
    """The most bytes that any cache has when they are demanded, by trying every choice of what to keep."""
    best = {frozenset(): 0}
    for request in workload.requests:
        following: dict[frozenset[str], int] = {}
        for kept, hits in best.items():
            found = hits + sum(workload.nbytes(document) for document in request.documents if document in kept)
            at_hand = sorted(kept | set(request.documents))
            for count in range(len(at_hand) + 1):
                for choice in itertools.combinations(at_hand, count):
                    if sum(map(workload.nbytes, choice)) <= capacity:
                        key = frozenset(choice)
                        following[key] = max(following.get(key, 0), found)
        best = following
    return max(best.values())


def drawn_workload(seed: int, sizes: int) -> Workload:
    draw = random.Random(seed)
    prompts = ["".join(draw.sample("abcde", draw.randint(1, 2))) for _ in range(9)]
    return workload_of(prompts, **{letter: draw.randint(1, sizes) for letter in "abcde"})


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_serves_what_was_used_before_if_all_fits(name):
    workload = workload_of(["ab", "ba", "c", "abc"], a=1, b=2, c=3)
    outcome = serve(workload, tokens_of(6), make_policy(name), COSTS)
    assert (outcome.demanded_chunks, outcome.hit_chunks) == (8, 5)
    assert (outcome.demanded_bytes, outcome.hit_bytes) == (tokens_of(15), tokens_of(9))


def test_saved_seconds_are_those_of_the_prefill_behind_what_stood_before():
    outcome = serve(workload_of(["ab", "ab"], a=10, b=20), tokens_of(30), make_policy("lru"), COSTS)
    assert outcome.saved_s == pytest.approx(30 / 1_000 + 1e-6 * (10 * 5 + 20 * (10 + 10)))


def test_lru_evicts_only_what_is_not_in_the_prompt_and_a_document_beyond_the_room_stays_out():
    workload = workload_of(["a", "bc", "a", "d", "b"], a=1, b=1, c=1, d=9)
    outcome = serve(workload, tokens_of(2), make_policy("lru"), COSTS)
    # a is displaced by b and c, then c by a (b, older in use order, goes first); d never comes in.
    assert outcome.hit_chunks == 0
    assert serve(workload, tokens_of(3), make_policy("lru"), COSTS).hit_chunks == 2


@pytest.mark.parametrize("seed", range(12))
def test_the_clairvoyant_is_the_optimum_for_one_size(seed):
    workload = drawn_workload(seed, sizes=1)
    found = serve_clairvoyantly(workload, tokens_of(2), SAVING)
    assert found.hit_bytes == best_hits(workload, tokens_of(2))


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_lies_between_the_clairvoyant_and_the_bound_for_any_sizes(seed):
    workload = drawn_workload(seed, sizes=4)
    capacity = tokens_of(5)
    best = best_hits(workload, capacity)
    assert serve_clairvoyantly(workload, capacity, SAVING).hit_bytes <= best
    assert best <= bound_hits(workload, capacity, SAVING).hit_bytes + 1e-3


def test_no_policy_passes_the_bound_and_intervals_hold_their_means():
    rows = run([interleave(generate_recording(6, seed=0), seed) for seed in range(3)], capacity_shares=(0.1, 0.3))
    assert [row.policy for row in rows] == 2 * [*POLICIES, ADVISED, CLAIRVOYANT, BOUND]
    for share in (0.1, 0.3):
        by_name = {row.policy: row for row in rows if row.capacity_share == share}
        for row in by_name.values():
            for measure in ("byte_hit_rate", "chunk_hit_rate", "saved_s"):
                interval = getattr(row, measure)
                assert interval.low <= interval.mean <= interval.high
                assert interval.mean <= getattr(by_name[BOUND], measure).mean + 1e-9
            assert 0 < row.byte_hit_rate.mean < 1
        assert by_name["lru"].byte_hit_gain.mean == 0


def test_frequency_beats_recency_where_popularity_stays():
    """On traffic of fixed popularity every better policy must show as one, and advice must not harm."""
    rows = run([zipf(400, 200, 0.9, 3, seed) for seed in range(3)], capacity_shares=(0.1,))
    rates = {row.policy: row.byte_hit_rate.mean for row in rows}
    assert rates["lru"] < rates["gdsf"] < rates[ADVISED] < rates[CLAIRVOYANT]
    assert rates["lru"] < rates["s3fifo"] < rates[CLAIRVOYANT] < rates[BOUND]


def test_nothing_to_compare_is_refused():
    with pytest.raises(EvalError, match="at least one workload"):
        run([])
    with pytest.raises(EvalError, match="capacities above 0"):
        run([workload_of(["a"])], capacity_shares=(0.0,))


def test_the_command_writes_what_it_found_and_how(tmp_path):
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--seed", "0", "--seed", "1", "--zipf-requests", "40", "--zipf-documents", "40"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads((out / "trace.json").read_text())
    assert [study["name"] for study in found["studies"]] == [
        "Generated sessions",
        "Zipf traffic, exponent 0.7",
        "Zipf traffic, exponent 1",
    ]
    assert found["arguments"]["seed"] == [0, 1]
    assert found["costs"]["kv_bytes_per_token"] == KV_BYTES_PER_TOKEN
    page = (out / "trace.md").read_text()
    assert "| clairvoyant |" in page
    assert "| oracle |" in page
    assert str(tmp_path) not in page + json.dumps(found)


def test_a_bad_trace_ends_the_command_with_one_sentence(tmp_path):
    done = CliRunner().invoke(app, ["--data", str(tmp_path / "none.jsonl"), "--embedder", "none"])
    assert done.exit_code == 2
    assert "cannot be read" in done.output
