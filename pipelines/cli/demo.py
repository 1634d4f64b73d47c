"""`cacheblend demo`: a small corpus, three questions, and what blending saves on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from cacheblend.sampling_params import SamplingParams
from inputs import INVENTED_PATH
from pipelines.answer import Answer
from pipelines.cli.answering import source_lines
from pipelines.cli.failures import ends_with_a_sentence
from pipelines.cli.options import AsJson, ModelOptions, RetrievalOptions, settings_of, takes_groups
from pipelines.cli.output import STDERR, log_to_stderr, on_one_line, print_json, print_lines, print_table
from pipelines.cli.progress import PrecomputeBar
from pipelines.cli.units import size_text
from pipelines.config import PipelineConfig, make_config
from pipelines.precompute import PrecomputeSummary
from retrieval.documents import Document
from retrieval.readers import read_documents

if TYPE_CHECKING:
    from pipelines.rag import RagPipeline

FOLDER = INVENTED_PATH.parent / "demo"
QUESTIONS = INVENTED_PATH.parent / "demo_questions.txt"
MAX_TOKENS = 24
TOP_K = 3
"""The bundled model is small, and answers from three documents better than from more."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to prefill, and its answers in the order of the questions."""

    name: str
    options: dict[str, str]
    answers: dict[str, Answer]

    @property
    def ttft_ms(self) -> float:
        """Median time to first token over the questions."""
        return median(answer.meta.ttft_ms or 0.0 for answer in self.answers.values())

    @property
    def selector(self) -> str | None:
        """The selector that ran, with its parameters."""
        return next(iter(self.answers.values())).meta.selector

    def total(self, field: str) -> int:
        """A count of `AnswerMeta` summed over the questions."""
        return sum(getattr(answer.meta, field) for answer in self.answers.values())

    def same_as(self, other: Arm) -> list[bool]:
        """For each question, whether the two arms answer it with the same text."""
        return [answer.text == other.answers[question].text for question, answer in self.answers.items()]


@ends_with_a_sentence
@takes_groups
def demo(model: ModelOptions, retrieval: RetrievalOptions, as_json: AsJson = False) -> None:
    """Precompute a small corpus, ask it three questions, and compare full prefill, reuse and blending.

    A second run finds every chunk cached.

    \b
    Example:
      cacheblend demo
    """
    log_to_stderr(model.verbose)
    config = make_config(**settings_of(model, retrieval), top_k=TOP_K)
    documents = [document for file in sorted(FOLDER.glob("*.md")) for document in read_documents(file)]
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    with STDERR.status(f"Loading {config.model}"):
        from pipelines.rag import RagPipeline

        pipeline = RagPipeline(documents, config)
    with pipeline:
        with PrecomputeBar() as bar:
            summary = pipeline.precompute(bar.update)
        arms = _ask(pipeline, documents, questions)
        setting = f"engine {pipeline.engine}, model {config.model}, {config.dtype}"
    if as_json:
        print_json(_account(config, pipeline.engine, summary, arms))
        return
    typer.echo(_precomputed(summary))
    for question in questions:
        typer.echo(f"\n{question}")
        for arm in arms:
            typer.echo(f"  {arm.name:<14}{on_one_line(arm.answers[question].text)}")
        print_lines(source_lines(arms[-1].answers[question]), heading="  sources", indent="    ")
    typer.echo()
    print_table(_comparison(arms, setting))


def _ask(pipeline: RagPipeline, documents: list[Document], questions: list[str]) -> list[Arm]:
    """Every question with every arm, the order of the arms turning from question to question."""
    arms = [
        Arm("full prefill", {"policy": "full"}, {}),
        Arm("reuse", {"policy": "blend", "selector": "none"}, {}),
        Arm("blend", {"policy": "blend"}, {}),
    ]
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    with STDERR.status("Warming up"):
        # Over all documents, so that every chunk is in host memory before anything is timed.
        pipeline.run(questions[0], documents=documents, sampling=SamplingParams(max_tokens=1))
    for turn, question in enumerate(questions):
        with STDERR.status(f"Asking: {question}"):
            for arm in _turned(arms, turn):
                arm.answers[question] = pipeline.run(question, sampling=sampling, **arm.options)
    return arms


def _turned(arms: list[Arm], turn: int) -> Iterator[Arm]:
    first = turn % len(arms)
    yield from arms[first:]
    yield from arms[:first]


def _precomputed(summary: PrecomputeSummary) -> str:
    if not summary.computed:
        return f"All {summary.distinct} chunks were cached, nothing was prefilled for them."
    return (
        f"{summary.computed} of {summary.distinct} chunks prefilled ({summary.tokens_computed:,} tokens, "
        f"{size_text(summary.kv_bytes)} of KV, {summary.seconds:.1f} s), {summary.cached} were cached."
    )


def _comparison(arms: list[Arm], setting: str) -> Table:
    selectors = ", ".join(f"{arm.name} is selector {arm.selector}" for arm in arms if arm.selector)
    table = Table(
        title=f"Three questions, {setting}",
        caption=f"Tokens summed over the questions, recomputed among the reused; {selectors}; chunks in host memory.",
    )
    table.add_column("prefill")
    for name in ("TTFT, median", "full / this", "prompt tokens", "reused", "recomputed"):
        table.add_column(name, justify="right")
    table.add_column("answer as full's")
    full = arms[0]
    for arm in arms:
        table.add_row(
            arm.name,
            f"{arm.ttft_ms:,.0f} ms",
            f"{full.ttft_ms / arm.ttft_ms:.1f}",
            f"{arm.total('prompt_tokens'):,}",
            f"{arm.total('reused_tokens'):,}",
            f"{arm.total('recomputed_tokens'):,}",
            ", ".join("yes" if same else "no" for same in arm.same_as(full)) if arm is not full else "",
        )
    return table


def _account(config: PipelineConfig, engine: str, summary: PrecomputeSummary, arms: list[Arm]) -> dict[str, Any]:
    return {
        "engine": engine,
        "model": config.model,
        "dtype": config.dtype,
        "precompute": summary.to_dict(),
        "arms": [
            {
                "name": arm.name,
                "ttft_ms_median": arm.ttft_ms,
                "ttft_of_full_over_this": arms[0].ttft_ms / arm.ttft_ms,
                "prompt_tokens": arm.total("prompt_tokens"),
                "reused_tokens": arm.total("reused_tokens"),
                "recomputed_tokens": arm.total("recomputed_tokens"),
                "same_answer_as_full": arm.same_as(arms[0]),
                "answers": [answer.to_dict() for answer in arm.answers.values()],
            }
            for arm in arms
        ],
    }
