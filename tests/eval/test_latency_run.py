"""`python -m eval.latency` from end to end, with a tiny random model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from eval.fidelity.arms import parse_arms
from eval.latency import app
from eval.speed import measure as measuring
from eval.speed.measure import ArmTimes, CpuShare, Stand, measure
from eval.speed.workload import make_workload

ARMS = "full,reuse,query:0.3"
NAMES = ARMS.split(",")
REPETITIONS = 4


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets the process's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def call(model: Path, *arguments: str) -> Any:
    common = ["--model", str(model), "--arms", ARMS, "--chunks", "3", "--chunk-tokens", "20", "--threads", "1"]
    return CliRunner().invoke(app, [*common, "--repetitions", str(REPETITIONS), *arguments])


@pytest.fixture
def served(monkeypatch) -> list[str]:
    """The arms in the order in which they were served."""
    served: list[str] = []
    serve = Stand.serve

    def noting(stand, arm):
        served.append(arm.name)
        return serve(stand, arm)

    monkeypatch.setattr(Stand, "serve", noting)
    return served


def test_it_prints_ratios_for_every_arm_and_writes_them_with_their_provenance_but_no_folder(model, tmp_path) -> None:
    out = tmp_path / "results" / "latency.json"
    result = call(model, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "TTFT full / arm" in result.stdout
    assert "Full prefill by transformers alone takes" in result.stdout
    written = json.loads(out.read_text())
    assert [arm["arm"] for arm in written["arms"]] == NAMES
    assert written["arms"][0]["full_over_arm"] == 1.0
    for arm in written["arms"]:
        assert arm["arm"] in result.stdout
        assert len(arm["ttft_share_of_full"]) == REPETITIONS
        assert arm["first_tokens_agree"]
    assert written["arms"][0]["first_token_is_fulls"]
    assert [arm["recomputed_tokens"] for arm in written["arms"][1:]] == [0, pytest.approx(18, abs=1)]
    account = written["provenance"]
    assert account["model"]["name"] == "tiny"
    assert len(account["model"]["fingerprint"]) == 64
    assert account["arguments"]["arms"] == ARMS
    assert account["code"]["commit"]
    assert {"python", "torch", "transformers"} <= account["versions"].keys()
    assert str(model.parent) not in out.read_text()
    assert str(tmp_path) not in out.read_text()


def test_arms_take_turns_in_an_order_drawn_for_each_repetition_after_one_warm_up_each(model, served) -> None:
    assert call(model).exit_code == 0
    rounds = [tuple(served[start : start + len(NAMES)]) for start in range(0, len(served), len(NAMES))]
    assert len(rounds) == 1 + REPETITIONS
    assert all(sorted(turns) == sorted(NAMES) for turns in rounds)
    assert len(set(rounds[1:])) > 1


def test_the_seed_repeats_the_order(model, served) -> None:
    assert call(model, "--seed", "3").exit_code == 0
    first = list(served)
    served.clear()
    assert call(model, "--seed", "3").exit_code == 0
    assert served == first


@pytest.mark.parametrize(("share", "void"), [(0.0, False), (1e9, True)])
def test_a_run_without_the_processors_to_itself_says_void(model, tmp_path, monkeypatch, share, void) -> None:
    monkeypatch.setattr(measuring, "IDLE_SHARE", share)
    result = call(model, "--out", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert ("VOID" in result.stdout) is void
    assert json.loads((tmp_path / "out.json").read_text())["void"] is void


def test_only_timed_repetitions_count_in_the_share_of_cpu(monkeypatch) -> None:
    counting, counted = [False], []
    timed = CpuShare.timed

    @contextmanager
    def noting(share):
        counting[0] = True
        with timed(share):
            yield
        counting[0] = False

    def stock() -> float:
        counted.append(counting[0])
        return 1.0

    monkeypatch.setattr(CpuShare, "timed", noting)
    _, stock_ms, _ = measure(lambda arm: pytest.fail("no arm"), stock, [], 2, 0, lambda: None)
    assert counted == [False, True, True]
    assert stock_ms == [1.0, 1.0]


def test_first_tokens_that_differ_between_repetitions_are_told(model, tmp_path, monkeypatch) -> None:
    note = ArmTimes.note

    def straying(times, outcome):
        note(times, outcome)
        if times.name == "reuse" and len(times.ttft_ms) == 1:
            times.first_tokens.add(-1)

    monkeypatch.setattr(ArmTimes, "note", straying)
    assert call(model, "--out", str(tmp_path / "out.json")).exit_code == 0
    arms = {arm["arm"]: arm for arm in json.loads((tmp_path / "out.json").read_text())["arms"]}
    assert [arms[name]["first_tokens_agree"] for name in NAMES] == [True, False, True]
    assert not arms["reuse"]["first_token_is_fulls"]


def test_cutting_chunks_from_all_documents_at_once_warns_of_nothing(smollm2, caplog) -> None:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.model_max_length = 200
    logging.enable_propagation()
    try:
        workload = make_workload(tokenizer, 3, 20)
    finally:
        logging.disable_propagation()
    assert [len(chunk) for chunk in workload.chunks] == [20, 20, 20]
    assert caplog.records == []


@pytest.fixture
def narrow(make_tiny_model, model, tmp_path) -> Path:
    """A model whose context is too short for the prompt."""
    from transformers import AutoTokenizer

    folder = tmp_path / "narrow"
    tokenizer = AutoTokenizer.from_pretrained(model)
    small = make_tiny_model("llama-default", vocab_size=len(tokenizer), max_position_embeddings=100)
    small.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def unsupported(model, tmp_path) -> Path:
    """A folder of a kind of model that the engine does not run."""
    from transformers import AutoTokenizer, GPT2Config

    folder = tmp_path / "unsupported"
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "float16"], "dtype 'float16' is not supported"),
        (["--arms", "nonsense"], "Arm 'nonsense' is unknown"),
        (["--model", "./no-such-model"], "no-such-model"),
        (["--chunks", "1000000"], "cannot be cut from the invented documents"),
        (["--chunks", "0"], "cannot be cut from the invented documents"),
        (["--out", "/proc/no-such-folder/latency.json"], "--out /proc/no-such-folder/latency.json cannot be written"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(model, arguments, words) -> None:
    assert_one_sentence(call(model, *arguments), words)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("narrow", "do not fit the model's context of 100"),
        ("unsupported", "gpt2"),
        ("without_tokenizer", "holds no tokenizer; save one there"),
    ],
)
def test_a_model_that_cannot_serve_the_prompt_is_one_sentence_and_exit_code_2(request, folder, words) -> None:
    assert_one_sentence(call(request.getfixturevalue(folder)), words)


def assert_one_sentence(result: Any, words: str) -> None:
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert words.lower() in line.lower()
    assert line.endswith(".")
    assert "Traceback" not in result.output


def test_a_prompt_that_the_engine_refuses_is_raised_and_not_timed(narrow) -> None:
    from transformers import AutoTokenizer

    from cacheblend.errors import BlendError
    from cacheblend.reference.runner import ReferenceRunner
    from kvstore.store import ChunkStore

    store = ChunkStore(None, 1 << 30)
    workload = make_workload(AutoTokenizer.from_pretrained(narrow), 5, 10)
    stand = Stand(ReferenceRunner.from_folder(narrow, store), store, workload)
    assert workload.length > 100
    with pytest.raises(BlendError, match="do not fit the model's context"):
        stand.serve(parse_arms("full")[0])
    stand.close()
