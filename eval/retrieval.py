"""How often the retriever finds what answers a question, beside random choice.

Every question searches all distinct contexts of the data file. A question's gold is its own contexts that
are marked as supporting (MuSiQue) or, where the data do not tell, that hold one of its answers
(CacheBlend); questions without gold are left out and counted.

    python -m eval.retrieval

What was chosen can be carried to `eval.musique --retrieved` as ids:

    python -m eval.retrieval --data FILE --ids retrieved.json
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import faiss
import sentence_transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eval.provenance import ModelIdentity, describe_file, provenance
from eval.retrieval_quality import Evaluation, evaluate, index_contexts, search
from eval.retrieved import DataFile, EmbedderIdentity, RetrievedContexts
from eval.statistics import Interval
from inputs import INVENTED_PATH, Example, distinct_contexts, load_examples
from pipelines.models import DEFAULT_EMBEDDER, resolve_embedder
from retrieval.embedding import SentenceEmbedder
from retrieval.index import CorpusIndex, Hit

app = typer.Typer(add_completion=False)


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
    held = evaluation.answers_held
    table.caption = (
        f"means over questions with 95 % bootstrap intervals; an answer is in the retrieved contexts of "
        f"{_percent(held.retrieved)} of all questions, in their own contexts of {_percent(held.own)}"
    )
    return table


def _percent(interval: Interval) -> str:
    return f"{100 * interval.mean:.2f} % [{100 * interval.low:.2f}, {100 * interval.high:.2f}]"


def _retrieve(examples: list[Example], embedder: SentenceEmbedder, k: int) -> tuple[CorpusIndex, list[list[Hit]]]:
    contexts = distinct_contexts(examples)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        embedding = progress.add_task("embedding contexts", total=len(contexts))
        index = index_contexts(contexts, embedder, lambda count: progress.advance(embedding, count))
        asking = progress.add_task("asking questions", total=len(examples))
        return index, search(examples, index, k, lambda count: progress.advance(asking, count))


def _as_ids(
    examples: list[Example], found: list[list[Hit]], data: Path, embedder: SentenceEmbedder, k: int
) -> RetrievedContexts:
    return RetrievedContexts(
        data=DataFile(**describe_file(data)),
        embedder=EmbedderIdentity(name=embedder.name, fingerprint=embedder.fingerprint),
        contexts=len(distinct_contexts(examples)),
        top_k=k,
        retrieved={
            example.id: tuple(int(hit.chunk.document_id) for hit in hits)
            for example, hits in zip(examples, found, strict=True)
        },
    )


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
    ids: Annotated[
        Path | None, typer.Option(help="Where to write what was chosen, for eval.musique --retrieved.")
    ] = None,
) -> None:
    """Report hit@k and recall@k of the retriever beside random choice.

    Example: python -m eval.retrieval
    """
    try:
        examples = load_examples(data)
        model = SentenceEmbedder(resolve_embedder(embedder))
        index, found = _retrieve(examples, model, k)
        if ids is not None:
            _as_ids(examples, found, data, model, k).save(ids)
        evaluation = evaluate(examples, found, len(index), k, seed)
        Console().print(_table(evaluation, data))
        if out is not None:
            arguments = {"data": data, "embedder": embedder, "k": k, "seed": seed, "out": out, "ids": ids}
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(_report(evaluation, arguments, model), indent=2) + "\n")
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
