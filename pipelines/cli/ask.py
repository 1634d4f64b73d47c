"""`cacheblend ask`: one question over documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pipelines.cli.failures import ends_with_a_sentence
from pipelines.cli.options import AnswerOptions, AsJson, ChunkOptions, ModelOptions, RetrievalOptions, takes_groups
from pipelines.cli.session import open_presenter

Docs = Annotated[list[Path], Option("--docs", metavar="PATHS...", help="Documents: files, or folders of them.")]
MoreDocs = Annotated[list[Path] | None, Argument(metavar="PATHS", hidden=True)]
Stream = Annotated[
    bool | None,
    Option("--stream/--no-stream", help="Print the text as it is generated.", show_default="on a terminal"),
]


@ends_with_a_sentence
@takes_groups
def ask(
    question: Annotated[str, Argument(metavar="QUESTION", help="The question; it comes before --docs.")],
    docs: Docs,
    model: ModelOptions,
    chunks: ChunkOptions,
    retrieval: RetrievalOptions,
    answer: AnswerOptions,
    more_docs: MoreDocs = None,
    stream: Stream = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question from documents, reusing what is cached of them.

    Prints the answer, its sources and an account of what was reused, what was recomputed, and why.

    \b
    Example:
      cacheblend ask "Which baker invented the salt cake?" --docs inputs/data/demo --top-k 3
    """
    paths = [*docs, *(more_docs or [])]
    with open_presenter(paths, model, chunks, retrieval, answer, stream, as_json) as presenter:
        presenter.answer(question)
