"""A loaded engine over the documents that a command names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipelines.cli.answering import Presenter, sampling_of
from pipelines.cli.documents import load_documents
from pipelines.cli.options import AnswerOptions, ChunkOptions, ModelOptions, RetrievalOptions, settings_of
from pipelines.cli.output import STDERR, log_to_stderr
from pipelines.config import make_config


@contextmanager
def open_presenter(
    paths: Sequence[Path],
    model: ModelOptions,
    chunks: ChunkOptions,
    retrieval: RetrievalOptions,
    answer: AnswerOptions,
    stream: bool | None,
    as_json: bool,
) -> Iterator[Presenter]:
    """Load documents and model, and give what answers questions over them.

    Options and documents are checked first: loading a model takes seconds.

    Raises:
        PipelineError, BlendError, ModelError, RetrievalError, DatasetError, StoreError: what cannot be used.
    """
    log_to_stderr(model.verbose)
    config = make_config(**settings_of(model, chunks, retrieval, answer))
    sampling = sampling_of(answer)
    documents = load_documents(paths)
    with STDERR.status(f"Loading {config.model}"):
        from pipelines.rag import RagPipeline

        pipeline = RagPipeline(documents, config)
    with pipeline:
        given = documents if answer.no_retrieval else None
        streams = sys.stdout.isatty() if stream is None else stream
        yield Presenter(pipeline, sampling, given, streams, as_json)
