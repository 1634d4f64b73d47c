"""Try policies of eviction and predictors on recorded sessions and on Zipf traffic; needs no model and no GPU.

python -m eval.trace --data FILE
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eval.errors import EvalError
from eval.failures import one_sentence_for_bad_input
from eval.provenance import ModelIdentity, provenance
from eval.trace import caching, prefetching
from eval.trace.candidates import RANKED, with_candidates
from eval.trace.host_simulation import MEASURED_COSTS
from eval.trace.recording import CHARACTERS_PER_TOKEN, Recording, generate_recording, read_recording
from eval.trace.report import Study, terminal_table, write
from eval.trace.workload import (
    KV_BYTES_PER_TOKEN,
    MEAN_SESSION_GAP_S,
    MEAN_THINK_S,
    Workload,
    interleave,
    zipf,
)
from pipelines.models import DEFAULT_EMBEDDER, resolve_embedder
from retrieval.embedding import SentenceEmbedder

NO_EMBEDDER = "none"
GENERATED_SESSIONS = 27
ZIPF_EXPONENTS = (0.7, 1.0)
ZIPF_TOP_K = 5

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class _Sessions:
    recording: Recording
    name: str
    note: str
    model: ModelIdentity


@app.command()
def simulate(
    data: Annotated[
        Path | None, typer.Option(help="Recorded sessions, JSON lines.", show_default="generated sessions")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for trace.json and trace.md.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Of an interleaving; give several.", show_default="0 to 9")
    ] = None,
    embedder: Annotated[
        str, typer.Option(help="Ranks candidates: a sentence-transformers folder, bundled:NAME, or none.")
    ] = DEFAULT_EMBEDDER,
    zipf_requests: Annotated[int, typer.Option(min=1, help="Requests of the Zipf traffic.")] = 1000,
    zipf_documents: Annotated[int, typer.Option(min=ZIPF_TOP_K, help="Documents of the Zipf traffic.")] = 1000,
) -> None:
    """Compare policies of eviction and predictors by what requests find in the cache.

    Example: python -m eval.trace --data sessions.jsonl --out results
    """
    seeds = seed or list(range(10))
    with one_sentence_for_bad_input():
        sessions = _sessions(data, embedder)
        studies = [_session_study(sessions, seeds)]
        for exponent in ZIPF_EXPONENTS:
            workloads = [zipf(zipf_requests, zipf_documents, exponent, ZIPF_TOP_K, one) for one in seeds]
            studies.append(_zipf_study(exponent, workloads))
        console = Console()
        for study in studies:
            console.print(terminal_table(study))
            if study.prefetching:
                console.print(prefetching.table(study.prefetching))
        if out is not None:
            arguments = {
                "data": data,
                "seed": seeds,
                "embedder": embedder,
                "zipf_requests": zipf_requests,
                "zipf_documents": zipf_documents,
            }
            _write(out, studies, _account(arguments, sessions.model, seeds[0], data))


def _sessions(data: Path | None, embedder: str) -> _Sessions:
    nothing = ModelIdentity(NO_EMBEDDER, NO_EMBEDDER)
    if data is None:
        note = "Generated sessions, with generated candidates."
        return _Sessions(generate_recording(GENERATED_SESSIONS, seed=0), "Generated sessions", note, nothing)
    recording = read_recording(data)
    if embedder == NO_EMBEDDER:
        return _Sessions(recording, data.name, "No embedder was given, so there are no candidates.", nothing)
    model = SentenceEmbedder(resolve_embedder(embedder))
    note = (
        f"Candidates are the best {RANKED} documents of our own retriever for a turn's question, less those in its "
        "prompt."
    )
    identity = ModelIdentity(embedder, model.fingerprint)
    return _Sessions(with_candidates(recording, model), data.name, note, identity)


def _session_study(sessions: _Sessions, seeds: list[int]) -> Study:
    workloads = [interleave(sessions.recording, seed) for seed in seeds]
    turns = sum(len(session.turns) for session in sessions.recording.sessions)
    notes = (
        f"{len(sessions.recording.sessions)} sessions with {turns} questions, {_size(workloads[0])}, in "
        f"{len(seeds)} seeded interleavings: sessions begin {MEAN_SESSION_GAP_S:g} s apart on average, questions of a "
        f"session follow after {MEAN_THINK_S:g} s on average, both exponential.",
        f"Tokens are estimated as one for {CHARACTERS_PER_TOKEN} characters.",
        sessions.note,
    )
    return Study(sessions.name, notes, caching.run(workloads), prefetching.run(workloads))


def _zipf_study(exponent: float, workloads: list[Workload]) -> Study:
    requests = len(workloads[0].requests)
    notes = (
        f"{requests} independent requests for {ZIPF_TOP_K} documents each, {_size(workloads[0])} with the first of "
        f"{len(workloads)} seeds.",
    )
    return Study(f"Zipf traffic, exponent {exponent:g}", notes, caching.run(workloads))


def _size(workload: Workload) -> str:
    return f"{len(workload.used)} distinct documents used, {workload.distinct_bytes / 1e9:.1f} GB of KV"


def _account(arguments: dict[str, Any], model: ModelIdentity, seed: int, data: Path | None) -> dict[str, Any]:
    costs = {
        "bytes_per_s": {tier.value: rate for tier, rate in MEASURED_COSTS.bytes_per_s.items()},
        "latency_s": {tier.value: seconds for tier, seconds in MEASURED_COSTS.latency_s.items()},
        "prefill_rows_per_s": MEASURED_COSTS.prefill_rows_per_s,
        "prefill_rows_squared_s": MEASURED_COSTS.prefill_rows_squared_s,
        "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
    }
    # Generated sessions have no file; the generator's source stands for it.
    file = data or Path(__file__).with_name("recording.py")
    return {**provenance(arguments, model, "cpu", seed, file), "costs": costs}


def _write(out: Path, studies: list[Study], account: dict[str, Any]) -> None:
    try:
        write(out, studies, account)
    except OSError as error:
        raise EvalError(f"The result cannot be written to {out} ({error.strerror}); name a folder to write.") from error


if __name__ == "__main__":
    app()
