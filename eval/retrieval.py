"""How often the retriever finds what answers a question, beside random choice.

Every question searches all distinct contexts of the data file. A question's gold is its own contexts that
are marked as supporting (MuSiQue) or, where the data do not tell, that hold one of its answers
(CacheBlend); questions without gold are left out and counted.

    python -m eval.retrieval
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Annotated, Any

import faiss
import numpy as np
import sentence_transformers
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eval.errors import EvalError
from eval.provenance import ModelIdentity, provenance
from eval.scoring import normalize_answer
from eval.statistics import Interval, bootstrap_mean
from inputs import INVENTED_PATH, Context, Example, distinct_contexts, load_examples
from pipelines.models import DEFAULT_EMBEDDER, resolve_embedder
from retrieval.chunk import Chunk
from retrieval.documents import Document
from retrieval.embedding import SentenceEmbedder
from retrieval.index import CorpusIndex

RANDOM_DRAWS = 1_000
EMBEDDED_AT_ONCE = 32

Advance = Callable[[int], None]

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the retriever and of random choice, 0 to 1, averaged over questions.

    Attributes:
        retriever: mean and 95 % bootstrap interval over questions.
        random_expected: what choosing k contexts at random gives on average, exactly.
        random_drawn: the same from seeded draws, with its interval over questions.
    """

    retriever: Interval
    random_expected: float
    random_drawn: Interval


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was counted and measured; ``metrics`` has ``hit@k`` and ``recall@k``."""

    questions: int
    left_out: int
    contexts: int
    metrics: dict[str, Metric]


def holds_answer(text: str, answer: str) -> bool:
    """Whether ``text`` holds ``answer`` as whole words, both normalised as SQuAD does.

    The last word may carry an s: normalisation glues a possessive's to its word ("Nazareth's"), and a
    plural names the thing as well.
    """
    wanted = normalize_answer(answer)
    pattern = rf"(?<!\S){re.escape(wanted)}s?(?!\S)"
    return bool(wanted) and re.search(pattern, normalize_answer(text)) is not None


def gold_contexts(example: Example) -> list[Context]:
    """Return the supporting contexts or, where the data do not tell, those that hold one of the answers."""
    if any(context.supporting is not None for context in example.contexts):
        return [context for context in example.contexts if context.supporting]
    return [
        context for context in example.contexts if any(holds_answer(context.text, answer) for answer in example.answers)
    ]


def evaluate(
    examples: list[Example], index: CorpusIndex, k: int, seed: int, advance: Advance = lambda count: None
) -> Evaluation:
    """Return hit@k and recall@k of ``index``, which holds all contexts of ``examples``, beside random choice.

    Args:
        examples: the questions.
        index: as ``index_contexts`` makes it.
        k: chunks retrieved for a question.
        seed: of resampling and of the random draws.
        advance: called with 1 after each question.

    Raises:
        EvalError: no question has gold.
        RetrievalError: ``k`` is below 1.
    """
    gold = [{as_chunk(context).id for context in gold_contexts(example)} for example in examples]
    asked = [(example, ids) for example, ids in zip(examples, gold, strict=True) if ids]
    if not asked:
        raise EvalError("No question has a context that answers it; give data with supporting contexts.")
    found = []
    for example, ids in asked:
        found.append(sum(hit.chunk.id in ids for hit in index.search(example.question, k)))
        advance(1)
    sizes = np.array([len(ids) for _, ids in asked])
    return Evaluation(
        questions=len(asked),
        left_out=len(examples) - len(asked),
        contexts=len(index),
        metrics=_metrics(np.array(found), sizes, len(index), k, seed),
    )


def as_chunk(context: Context, name: str = "") -> Chunk:
    """Return a context as one chunk."""
    return Chunk.whole(Document(name, context.text, context.title))


def index_contexts(
    contexts: list[Context], embedder: SentenceEmbedder, advance: Advance = lambda count: None
) -> CorpusIndex:
    """Return an index over ``contexts``, one chunk each; ``advance`` gets the number just embedded."""
    index = CorpusIndex(embedder)
    chunks = [as_chunk(context, f"context-{place}") for place, context in enumerate(contexts)]
    for start in range(0, len(chunks), EMBEDDED_AT_ONCE):
        batch = chunks[start : start + EMBEDDED_AT_ONCE]
        index.add(batch)
        advance(len(batch))
    return index


def _metrics(found: NDArray[np.int64], sizes: NDArray[np.int64], contexts: int, k: int, seed: int) -> dict[str, Metric]:
    """Return the metrics from the number of gold contexts found and there, int64 [questions]."""
    k = min(k, contexts)
    misses = np.array([comb(contexts - size, k) / comb(contexts, k) for size in sizes.tolist()])
    # How many gold contexts are among k chosen at random, [draws, questions].
    drawn = np.random.default_rng(seed).hypergeometric(sizes, contexts - sizes, k, (RANDOM_DRAWS, sizes.size))
    return {
        f"hit@{k}": Metric(
            bootstrap_mean(found > 0, seed=seed),
            float((1 - misses).mean()),
            bootstrap_mean((drawn > 0).mean(axis=0), seed=seed),
        ),
        f"recall@{k}": Metric(
            bootstrap_mean(found / sizes, seed=seed),
            k / contexts,
            bootstrap_mean((drawn / sizes).mean(axis=0), seed=seed),
        ),
    }


def _report(evaluation: Evaluation, arguments: dict[str, Any], embedder: SentenceEmbedder) -> dict[str, Any]:
    identity = ModelIdentity(str(arguments["embedder"]), embedder.fingerprint)
    account = provenance(arguments, identity, embedder.device, arguments["seed"], arguments["data"])
    account["versions"] |= {"sentence-transformers": sentence_transformers.__version__, "faiss": faiss.__version__}
    return {**account, **asdict(evaluation)}


def _table(evaluation: Evaluation, data: Path) -> Table:
    table = Table(
        title=f"{data.name}: {evaluation.questions} questions over {evaluation.contexts} contexts, "
        f"{evaluation.left_out} without a context that answers left out"
    )
    for heading in ("metric", "retriever", "random, expected", "random, drawn"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for name, metric in evaluation.metrics.items():
        table.add_row(
            name,
            _percent(metric.retriever),
            f"{100 * metric.random_expected:.2f} %",
            _percent(metric.random_drawn),
        )
    table.caption = "means over questions with 95 % bootstrap intervals"
    return table


def _percent(interval: Interval) -> str:
    return f"{100 * interval.mean:.2f} % [{100 * interval.low:.2f}, {100 * interval.high:.2f}]"


def _measure(examples: list[Example], embedder: SentenceEmbedder, k: int, seed: int) -> Evaluation:
    contexts = distinct_contexts(examples)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        embedding = progress.add_task("embedding contexts", total=len(contexts))
        index = index_contexts(contexts, embedder, lambda count: progress.advance(embedding, count))
        asking = progress.add_task("asking questions", total=sum(1 for e in examples if gold_contexts(e)))
        return evaluate(examples, index, k, seed, lambda count: progress.advance(asking, count))


@app.command()
def evaluate_retrieval(
    data: Annotated[
        Path,
        typer.Option(help="MuSiQue's JSON lines or CacheBlend's JSON array.", show_default="our invented questions"),
    ] = INVENTED_PATH,
    embedder: Annotated[
        str, typer.Option(help="A sentence-transformers folder, a hub id or bundled:NAME.")
    ] = DEFAULT_EMBEDDER,
    k: Annotated[int, typer.Option(min=1, help="Contexts retrieved for a question.")] = 5,
    seed: Annotated[int, typer.Option(help="Of resampling and random draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
) -> None:
    """Report hit@k and recall@k of the retriever beside random choice.

    Example: python -m eval.retrieval
    """
    try:
        examples = load_examples(data)
        model = SentenceEmbedder(resolve_embedder(embedder))
        evaluation = _measure(examples, model, k, seed)
        Console().print(_table(evaluation, data))
        if out is not None:
            arguments = {"data": data, "embedder": embedder, "k": k, "seed": seed, "out": out}
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(_report(evaluation, arguments, model), indent=2) + "\n")
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
