"""A question answered and shown, for the commands that ask."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from cacheblend.sampling_params import SamplingParams
from pipelines.answer import Answer, AnswerMeta
from pipelines.cli.options import AnswerOptions
from pipelines.cli.output import PIPED_WIDTH, on_one_line, print_json, print_lines, printable

if TYPE_CHECKING:
    from pipelines.rag import RagPipeline
    from retrieval.documents import Document


@dataclass(frozen=True, slots=True)
class Presenter:
    """Asks a pipeline and shows what comes back.

    Attributes:
        pipeline: answers.
        sampling: how answers are drawn.
        documents: answer from all of these in order; None retrieves.
        stream: show the text as it is generated.
        as_json: print each answer as one line of JSON instead.
    """

    pipeline: RagPipeline
    sampling: SamplingParams
    documents: list[Document] | None
    stream: bool
    as_json: bool

    def answer(self, question: str) -> None:
        """Answer a question on stdout: the text, its sources and its account.

        Raises:
            PipelineError, BlendError, RetrievalError: as `RagPipeline.prepare`; nothing has been printed then.
        """
        if self.stream and not self.as_json:
            answer = self._streamed(question)
        else:
            answer = self.pipeline.run(question, documents=self.documents, sampling=self.sampling)
            if self.as_json:
                print_json(answer.to_dict())
                return
            typer.echo(printable(answer.text))
        typer.echo()
        print_lines(source_lines(answer), heading="Sources")
        typer.echo(account_of(answer.meta))

    def _streamed(self, question: str) -> Answer:
        stream = self.pipeline.stream(question, documents=self.documents, sampling=self.sampling)
        begun = False
        for piece in stream:
            text = piece if begun else piece.lstrip()
            begun = begun or bool(text)
            sys.stdout.write(printable(text))
            sys.stdout.flush()
        typer.echo()
        return stream.answer


def sampling_of(options: AnswerOptions) -> SamplingParams:
    """How answers are drawn.

    Raises:
        BlendError: for a value out of range.
    """
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        stop=tuple(options.stop or ()),
    )


def source_lines(answer: Answer) -> list[str]:
    """The sources of an answer, best first, a line each: score, document, and how the text begins."""
    names = [on_one_line(source.document_id) for source in answer.sources]
    width = max(map(len, names), default=0)
    lines = []
    for name, source in zip(names, answer.sources, strict=True):
        score = "" if source.score is None else f"{source.score:.3f}  "
        text = f"{source.title}: {source.text}" if source.title else source.text
        lines.append(f"{score}{name:<{width}}  {on_one_line(text[:PIPED_WIDTH])}")
    return lines


def account_of(meta: AnswerMeta) -> str:
    """What was reused and recomputed and how long it took, in one line; a second one if something was not reused."""
    parts = [f"engine {meta.engine}", f"mode {meta.mode}"]
    if meta.selector is not None:
        parts.append(f"selector {meta.selector}")
    if meta.ttft_ms is not None:
        parts.append(f"TTFT {meta.ttft_ms:,.0f} ms")
    reuse = f"{meta.reused_tokens:,} reused, {meta.recomputed_tokens:,} of them recomputed"
    parts.append(f"{meta.prompt_tokens:,} prompt tokens: {reuse}")
    lines = [" | ".join(parts)]
    if meta.fallback_reasons:
        counts = Counter(meta.fallback_reasons).items()
        lines.append("prefilled although reuse was asked for: " + ", ".join(f"{n} x {reason}" for reason, n in counts))
    if "missing" in meta.fallback_reasons:
        lines.append("precompute-chunk-cache on the same documents computes missing chunks ahead.")
    if "prefix_changed" in meta.fallback_reasons:
        settings = "prefix, primer and system prompt"
        lines.append(f"prefix_changed: stored behind another prefix; ask with the {settings} of precomputing.")
    return "\n".join(lines)
