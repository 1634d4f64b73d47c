"""`precompute-chunk-cache`: prefills the chunks of documents into the cache, ahead of any question."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from typer import Argument, Option

from pipelines.cli.documents import load_documents
from pipelines.cli.failures import INTERRUPTED, ends_with_a_sentence
from pipelines.cli.options import AsJson, ChunkOptions, ModelOptions, settings_of, takes_groups
from pipelines.cli.output import log_to_stderr, print_json, print_table
from pipelines.cli.progress import PrecomputeBar
from pipelines.cli.units import parse_size, size_text
from pipelines.config import make_config
from pipelines.precompute import PrecomputeSummary
from pipelines.primer_source import require_saveable, save_primer

if TYPE_CHECKING:
    from pipelines.rag import RagPipeline

NOT_KEPT = 1

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
@ends_with_a_sentence
@takes_groups
def precompute_chunk_cache(
    paths: Annotated[list[Path], Argument(metavar="PATHS", help="Files, or folders of them.")],
    model: ModelOptions,
    chunks: ChunkOptions,
    host_budget_bytes: Annotated[
        int,
        Option("--host-budget", parser=parse_size, metavar="SIZE", help="KV to keep in memory as well, e.g. 4GiB."),
    ] = 0,
    save_primer_as: Annotated[
        Path | None,
        Option(
            "--save-primer",
            metavar="FILE",
            help="Keep what --primer auto chose as a .jsonl file for --primer, so that documents added later do not "
            "change it.",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prefill the chunks of documents once, so that questions can reuse their KV.

    PATHS are .txt, .md and .jsonl documents, folders of them, and questions in MuSiQue's or CacheBlend's shape
    (.json or .jsonl), whose contexts are taken. What is cached is skipped: run it again after an interruption or when
    documents were added. Ask with the same model, dtype, prefix, primer, system prompt and chunk settings.

    A primer (--primer auto) brings answers closer to full prefill's where the documents are of one kind, and may do
    the opposite where they are mixed. Other documents may give another primer: then all chunks are computed anew, and
    questions over these documents alone miss them. For a corpus that grows, give --primer auto --save-primer FILE
    once, and --primer FILE ever after, here and when asking.

    \b
    Example:
      precompute-chunk-cache inputs/data/demo
    """
    if save_primer_as is not None:
        require_saveable(save_primer_as)
    log_to_stderr(model.verbose)
    config = make_config(**settings_of(model, chunks), host_budget_bytes=host_budget_bytes)
    documents = load_documents(paths)
    from pipelines.rag import RagPipeline

    with RagPipeline(documents, config) as pipeline:
        if save_primer_as is not None:
            save_primer(save_primer_as, pipeline.primer)
        summary = _precompute(pipeline, dry_run)
        primer = [token for chunk in pipeline.primer for token in chunk.token_ids]
        account = {
            "documents": len(documents),
            **summary.to_dict(),
            "model": config.model,
            "engine": pipeline.engine,
            "dtype": config.dtype,
            "cache_dir": str(config.cache_dir),
            "primer": primer,
        }
    if as_json:
        print_json(account)
    else:
        print_table(summary_table(summary, len(documents), account["engine"], str(config.cache_dir), len(primer)))
    if summary.not_on_disk or summary.not_kept:
        raise typer.Exit(NOT_KEPT)


def summary_table(summary: PrecomputeSummary, documents: int, engine: str, cache_dir: str, primer: int) -> Table:
    """What a precomputation did, for people."""
    table = Table(title="Dry run: nothing was computed" if summary.dry_run else None, show_header=False)
    computed = "to compute" if summary.dry_run else "computed"
    table.add_row("engine", engine)
    table.add_row("documents", f"{documents:,}")
    table.add_row("chunks", f"{summary.chunks:,} ({summary.distinct:,} different)")
    table.add_row("primer", f"{primer:,} tokens" if primer else "none")
    table.add_row("cached before", f"{summary.cached:,}")
    table.add_row(computed, f"{summary.computed:,} ({summary.tokens_computed:,} of {summary.tokens:,} tokens)")
    table.add_row("KV " + computed, f"{size_text(summary.kv_bytes)} ({summary.bytes_per_token:,} bytes a token)")
    if summary.computed and not summary.dry_run:
        rate = summary.tokens_computed / summary.seconds
        table.add_row("time", f"{summary.seconds:,.1f} s ({rate:,.0f} tokens/s)")
    for reason, count in summary.not_on_disk.items():
        table.add_row("not kept on disk", f"{count:,} ({reason})")
    if summary.not_kept:
        table.add_row("kept nowhere", f"{summary.not_kept:,}")
    table.add_row("cache folder", cache_dir)
    return table


def _precompute(pipeline: RagPipeline, dry_run: bool) -> PrecomputeSummary:
    try:
        with PrecomputeBar(disable=dry_run) as bar:
            return pipeline.precompute(bar.update, dry_run)
    except KeyboardInterrupt:
        # Closing lets the chunks that are being computed be stored, so that they are counted.
        pipeline.close()
        left = pipeline.precompute(dry_run=True)
        typer.echo(
            f"Interrupted: {left.cached} of {left.distinct} chunks are cached; run the same command again to go on.",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None


def run() -> None:
    """Run the command; the entry point of `precompute-chunk-cache`."""
    app(prog_name="precompute-chunk-cache")


if __name__ == "__main__":
    run()
