"""Contexts retrieved once, carried as ids, and answered over by `python -m eval.musique --retrieved`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval import musique, retrieval
from eval.retrieval_quality import as_chunk, index_contexts, search
from eval.retrieved import RetrievedContexts, give_retrieved
from inputs import INVENTED_PATH, distinct_contexts, load_invented
from pipelines.models import DEFAULT_EMBEDDER, resolve_embedder
from retrieval.embedding import SentenceEmbedder

TOP_K = 3


def retrieve(ids: Path, *arguments: str) -> Any:
    return CliRunner().invoke(retrieval.app, ["--k", str(TOP_K), "--ids", str(ids), *arguments])


def answer(model: Path, out: Path, *arguments: str) -> Any:
    common = ["--model", str(model), "--out", str(out), "--arms", "reuse", "--questions", "2", "--max-tokens", "3"]
    return CliRunner().invoke(musique.app, [*common, *arguments])


def reused_tokens(out: Path) -> dict[str, int]:
    """Tokens of each question's chunks."""
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    return {r["question"]: r["reused_tokens"] for r in records if r["record"] == "answer" and r["arm"] == "reuse"}


@pytest.fixture(scope="module")
def ids(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "retrieved.json"
    result = retrieve(path)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def carried(model, ids, tmp_path_factory) -> Path:
    """A finished run over retrieved contexts."""
    out = tmp_path_factory.mktemp("runs") / "retrieved"
    result = answer(model, out, "--retrieved", str(ids))
    assert result.exit_code == 0, result.output
    return out


def changed(ids: Path, folder: Path, change: Any) -> Path:
    content = json.loads(ids.read_text())
    change(content)
    path = folder / "changed.json"
    path.write_text(json.dumps(content))
    return path


def test_carried_ids_lead_to_the_contexts_that_the_index_finds_best_first(ids) -> None:
    examples = load_invented()
    index = index_contexts(distinct_contexts(examples), SentenceEmbedder(resolve_embedder(DEFAULT_EMBEDDER), "cpu"))
    given = give_retrieved(ids, INVENTED_PATH, examples)
    assert [(e.id, e.question, e.answers) for e in given] == [(e.id, e.question, e.answers) for e in examples]
    for example, hits in zip(given, search(examples, index, TOP_K), strict=True):
        assert [as_chunk(context).id for context in example.contexts] == [hit.chunk.id for hit in hits]
        assert len(example.contexts) == TOP_K
    assert [e.contexts for e in given] != [e.contexts[:TOP_K] for e in examples]


def test_the_ids_hold_nothing_of_the_datas_text_and_no_folder(ids) -> None:
    content = json.loads(ids.read_text())
    assert set(content) == {"format", "version", "data", "embedder", "contexts", "top_k", "retrieved"}
    assert set(content["data"]) == {"name", "bytes", "sha256"}
    assert content["data"]["name"] == INVENTED_PATH.name
    assert content["embedder"]["name"] == Path(resolve_embedder(DEFAULT_EMBEDDER)).name
    assert list(content["retrieved"]) == [example.id for example in load_invented()]
    assert all(isinstance(place, int) for places in content["retrieved"].values() for place in places)


def test_equal_ids_are_written_as_equal_bytes(ids, tmp_path) -> None:
    again = tmp_path / "new" / "again.json"
    RetrievedContexts.load(ids).save(again)
    assert again.read_bytes() == ids.read_bytes()


def test_the_quality_says_how_often_an_answer_is_retrieved_of_all_questions(tmp_path) -> None:
    data = [
        {"question": "Which animal barks?", "answers": ["dog"], "ctxs": [{"title": "", "text": "A dog barks."}]},
        {"question": "Does the dog bark?", "answers": ["a dog"], "ctxs": [{"title": "", "text": "The sea is deep."}]},
        {"question": "How deep is the sea?", "answers": ["nobody"], "ctxs": [{"title": "", "text": "A dog barks."}]},
    ]
    (tmp_path / "data.json").write_text(json.dumps(data))
    out = tmp_path / "quality.json"
    arguments = ["--data", str(tmp_path / "data.json"), "--k", "1", "--out", str(out)]
    assert CliRunner().invoke(retrieval.app, arguments).exit_code == 0
    held = json.loads(out.read_text())["answers_held"]
    assert {name: interval["mean"] for name, interval in held.items()} == {
        "retrieved": pytest.approx(2 / 3),
        "own": pytest.approx(1 / 3),
        "difference": pytest.approx(1 / 3),
    }


def test_questions_are_answered_over_the_retrieved_contexts_under_their_own_ids(carried, model, ids) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    examples = give_retrieved(ids, INVENTED_PATH, load_invented())[:2]
    assert reused_tokens(carried) == {
        example.id: sum(len(tokenizer(as_chunk(context).text).input_ids) for context in example.contexts)
        for example in examples
    }


def test_results_over_retrieved_contexts_are_never_mixed_with_others(carried, model, ids, tmp_path) -> None:
    stated = json.loads((carried / "result.json").read_text())["settings"]["retrieved"]
    assert (stated["name"], stated["top_k"], stated["contexts"]) == (
        "retrieved.json",
        TOP_K,
        len(distinct_contexts(load_invented())),
    )

    def reverse(content: dict[str, Any]) -> None:
        content["retrieved"] = {name: places[::-1] for name, places in content["retrieved"].items()}

    own, before = tmp_path / "own", (carried / "records.jsonl").read_bytes()
    assert answer(model, own).exit_code == 0
    assert json.loads((own / "result.json").read_text())["settings"]["retrieved"] is None
    for out, arguments in (
        (carried, []),
        (carried, ["--retrieved", str(changed(ids, tmp_path, reverse))]),
        (own, ["--retrieved", str(ids)]),
    ):
        refused = answer(model, out, *arguments)
        assert refused.exit_code == 2
        assert "holds results of other settings (retrieved)" in refused.stderr
    assert (carried / "records.jsonl").read_bytes() == before


FIRST = load_invented()[0].id
COUNT = len(distinct_contexts(load_invented()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["retrieved"][FIRST].append(COUNT), f"has the retrieved context {COUNT}, but"),
        (lambda c: c["retrieved"][FIRST].append(c["retrieved"][FIRST][0]), "has a retrieved context twice"),
        (lambda c: c["retrieved"].pop(FIRST), f"No contexts were retrieved for question {FIRST}"),
        (lambda c: c["retrieved"][FIRST].clear(), f"holds no retrieved contexts (retrieved.{FIRST}"),
        (lambda c: c["retrieved"][FIRST].append(-1), f"holds no retrieved contexts (retrieved.{FIRST}"),
        (lambda c: c["retrieved"][FIRST].append("7"), f"holds no retrieved contexts (retrieved.{FIRST}"),
        (lambda c: c.update(version=2), "holds no retrieved contexts (version"),
        (lambda c: c.update(contexts=COUNT - 1), f"is read as {COUNT} distinct ones now"),
        (
            lambda c: c["data"].update(sha256="0" * 64),
            "belongs to a data file invented_musique.jsonl with SHA-256 0000",
        ),
    ],
)
def test_ids_that_do_not_fit_the_data_are_one_sentence_and_exit_code_2(ids, model, tmp_path, change, message) -> None:
    refused = answer(model, tmp_path / "out", "--retrieved", str(changed(ids, tmp_path, change)))
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.endswith(".\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"[]", b'{"retrieved": '])
def test_a_file_that_holds_no_ids_is_one_sentence_and_exit_code_2(model, tmp_path, content) -> None:
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_bytes(content)
    for given in (path, tmp_path):
        refused = answer(model, tmp_path / "out", "--retrieved", str(given))
        assert refused.exit_code == 2
        assert str(given) in refused.stderr
        assert "write one with python -m eval.retrieval --ids." in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_one_sentence_and_exit_code_2(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    refused = retrieve(tmp_path / "file" / "ids.json")
    assert refused.exit_code == 2
    assert "cannot be written" in refused.stderr.splitlines()[-1]


def test_answering_over_carried_ids_needs_no_embedder(ids) -> None:
    script = (
        "import sys; from pathlib import Path; import eval.musique; from eval.retrieved import give_retrieved; "
        "from inputs import INVENTED_PATH, load_invented; "
        f"give_retrieved(Path({str(ids)!r}), INVENTED_PATH, load_invented()); "
        "print({'faiss', 'sentence_transformers'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.check_output([sys.executable, "-c", script], text=True, cwd=root).strip() == "set()"
