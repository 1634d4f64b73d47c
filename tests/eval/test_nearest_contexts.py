"""Contexts nearest to each, carried as places, and primers made of them by `python -m eval.musique --nearest`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval import musique, retrieval
from eval.errors import EvalError
from eval.fidelity.priming import Priming, choose_prefixes
from eval.nearest import NEAREST, NearestContexts
from eval.retrieval_quality import as_chunk, index_contexts
from inputs import INVENTED_PATH, Context, distinct_contexts, load_invented
from pipelines.models import DEFAULT_EMBEDDER, resolve_embedder
from retrieval.embedding import SentenceEmbedder

HEAD = (1, 2)
CHUNKS = [[(10, 11), (12,)], [(20, 21, 22)], [(30, 31)], [(40,) * 9]]
"""Of four contexts: the first is two chunks."""


def answer(model: Path, out: Path, *arguments: str) -> Any:
    common = ["--model", str(model), "--out", str(out), "--arms", "reuse", "--questions", "2", "--max-tokens", "3"]
    return CliRunner().invoke(musique.app, [*common, *arguments])


def prefixes(nearest: list[list[int]], tokens: int) -> Any:
    contexts = [Context("", str(place)) for place in range(len(CHUNKS))]
    return choose_prefixes(HEAD, CHUNKS, Priming(contexts, tokens, nearest))


@pytest.fixture(scope="module")
def carried(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("nearest") / "nearest.json"
    result = CliRunner().invoke(retrieval.app, ["--nearest", str(path)])
    assert result.exit_code == 0, result.output
    return path


def test_the_nearest_contexts_are_those_that_the_index_finds_by_a_contexts_own_beginning(carried) -> None:
    contexts = distinct_contexts(load_invented())
    nearest = NearestContexts.load(carried, INVENTED_PATH).of(contexts)
    index = index_contexts(contexts, SentenceEmbedder(resolve_embedder(DEFAULT_EMBEDDER), "cpu"))
    for place in (0, 7, len(contexts) - 1):
        found = [int(hit.chunk.document_id) for hit in index.search(as_chunk(contexts[place]).text, NEAREST + 1)]
        assert list(nearest[place]) == [other for other in found if other != place][:NEAREST]
    assert all(len(others) == NEAREST for others in nearest)


def test_a_primer_is_the_nearest_chunks_that_fit_with_the_nearest_right_before_the_chunk() -> None:
    chosen = prefixes([[1, 2], [2, 0], [3], [0]], tokens=5)
    assert chosen.behind((10, 11)) == chosen.behind((12,)) == (*HEAD, 30, 31, 20, 21, 22)
    assert chosen.behind((20, 21, 22)) == (*HEAD, 12, 10, 11, 30, 31)
    assert chosen.behind((30, 31)) == HEAD, "its nearest does not fit, and the next would not be its nearest"
    assert chosen.behind((40,) * 9) == (*HEAD, 12, 10, 11)
    assert chosen.behind((5, 5)) == HEAD, "a chunk that is not of the corpus"


def test_primers_with_which_nothing_fits_are_refused() -> None:
    with pytest.raises(EvalError, match="give more --primer-tokens"):
        prefixes([[3], [3], [3], [1]], tokens=2)


def test_chunks_are_reused_from_behind_primers_of_their_own(model, carried, tmp_path) -> None:
    result = answer(model, tmp_path, "--nearest", str(carried), "--primer-tokens", "300")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "result.json").read_text())
    primer = content["settings"]["primer"]
    assert (primer["own"] > 0, primer["at_most"], primer["nearest"]["name"]) == (True, 300, carried.name)
    assert all(row["fallbacks"] == {} for row in content["rows"])
    assert "a primer of its own" in (tmp_path / "result.md").read_text()
    again = answer(model, tmp_path, "--primer-tokens", "300")
    assert (again.exit_code, "other settings (primer)" in again.stderr) == (2, True)


def test_nearest_without_primer_tokens_is_one_sentence_and_exit_code_2(model, carried, tmp_path) -> None:
    refused = answer(model, tmp_path, "--nearest", str(carried))
    assert refused.exit_code == 2
    assert "give --primer-tokens as well" in refused.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["nearest"][3].append(3), "nearest context 3"),
        (lambda c: c["nearest"][0].append(100_000), "nearest context 100000"),
        (lambda c: c["nearest"].pop(), "have a nearest one"),
        (lambda c: c.update(contexts=5), "were searched"),
        (lambda c: c["data"].update(sha256="0" * 64), "belongs to a data file"),
        (lambda c: c.update(format="retrieved contexts"), "holds no nearest contexts"),
    ],
)
def test_places_that_do_not_belong_to_the_data_are_refused(carried, tmp_path, change, said) -> None:
    content = json.loads(carried.read_text())
    change(content)
    (tmp_path / "changed.json").write_text(json.dumps(content))
    with pytest.raises(EvalError, match=said):
        NearestContexts.load(tmp_path / "changed.json", INVENTED_PATH).of(distinct_contexts(load_invented()))
