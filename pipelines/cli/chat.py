"""`cacheblend chat`: several questions over one loaded engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import typer

from pipelines.cli.ask import Docs, MoreDocs, Stream
from pipelines.cli.failures import ROOM_ERRORS, ends_with_a_sentence, report_error
from pipelines.cli.options import AnswerOptions, AsJson, ChunkOptions, ModelOptions, RetrievalOptions, takes_groups
from pipelines.cli.session import open_presenter

QUIT = ":quit"


@ends_with_a_sentence
@takes_groups
def chat(
    docs: Docs,
    model: ModelOptions,
    chunks: ChunkOptions,
    retrieval: RetrievalOptions,
    answer: AnswerOptions,
    more_docs: MoreDocs = None,
    stream: Stream = None,
    as_json: AsJson = False,
) -> None:
    """Answer questions, one a line, over one loaded engine; each is asked anew, without the ones before.

    Empty lines are passed over; the end of input or :quit ends. A question that cannot be answered gets its sentence
    on stderr, and the next one is read. With --json each answer is one line of JSON.

    \b
    Example:
      cacheblend chat --docs inputs/data/demo < inputs/data/demo_questions.txt
    """
    paths = [*docs, *(more_docs or [])]
    with open_presenter(paths, model, chunks, retrieval, answer, stream, as_json) as presenter:
        for question in _questions():
            try:
                presenter.answer(question)
            except ROOM_ERRORS as error:
                report_error(error)
            if not as_json:
                typer.echo()


def _questions() -> Iterator[str]:
    for line in _lines():
        question = line.strip()
        if question == QUIT:
            return
        if question:
            yield question


def _lines() -> Iterator[str]:
    # Bytes that are not UTF-8 become U+FFFD: one bad line must not end the questions. Not every stdin can be told.
    if (reconfigure := getattr(sys.stdin, "reconfigure", None)) is not None:
        reconfigure(errors="replace")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from sys.stdin
        return
    import readline  # noqa: F401 - lets input() edit the line and recall earlier ones

    while True:
        try:
            yield input("> ")
        except EOFError:
            return
