"""How much of the disk's bandwidth the disk tier reaches, cold and warm.

    python -m eval.disk_bandwidth --folder FOLDER_ON_THE_DISK --out result.json

Chunk files of an 8B model's shape are written, then read in rounds of random order: by plain parallel reads, which
is what the device allows, and by the disk tier, verified, into memory allocated before (pinned on a GPU machine).
Cold means that this machine's page cache was dropped for the files; what lies below it may have a cache of its own.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eval.errors import EvalError
from eval.failures import one_sentence_for_bad_input
from eval.provenance import REPOSITORY, describe_code, describe_device, package_versions
from kvstore.chunk import ChunkKV, tensor_bytes
from kvstore.disk import DiskTier
from kvstore.errors import ChunkUnavailable
from kvstore.key import ChunkIdentity, ShardLayout
from pipelines.cli.output import print_table

BAR = 0.8
"""Share of the device's cold bandwidth that the tier has to reach."""
READERS = (1, 2, 4, 8)
SERVING_READERS = 4
"""As many chunks at a time as the store's prefetcher reads."""
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
READ_BYTES = 1 << 20

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """One way to read every file: `device` (plain reads) or `tier`, by so many readers at once."""

    way: str
    readers: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Every file read once: bytes of all files, seconds, and bytes that came from the device (None: unknown)."""

    nbytes: int
    seconds: float
    from_device: int | None

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth."""
        return self.nbytes / self.seconds


class Stand:
    """Chunk files in a folder, and memory for all of them.

    Args:
        folder: where they are written; an empty one.
        files: how many.
        chunk_tokens: tokens of each; 128 KiB a token.

    Raises:
        EvalError: the folder has no room for them.
    """

    def __init__(self, folder: Path, files: int, chunk_tokens: int) -> None:
        self._tier = DiskTier(folder, require_writable=True)
        shape = (LAYERS, 2, chunk_tokens, KV_HEADS, HEAD_DIM)
        pinned = torch.cuda.is_available()
        self._memory = [torch.zeros(shape, dtype=torch.bfloat16, pin_memory=pinned) for _ in range(files)]
        self._identities = [ChunkIdentity("bandwidth", (), (seed,) * chunk_tokens) for seed in range(files)]
        self._paths = [self._write(identity, shape) for identity in self._identities]
        self._head_bytes = self._paths[0].stat().st_size - tensor_bytes(self._memory[0]).nbytes
        self.nbytes = sum(path.stat().st_size for path in self._paths)

    def read(self, arm: Arm, cold: bool) -> Reading:
        """Read every file once."""
        read: Callable[[int], object] = self._by_tier if arm.way == "tier" else self._plainly
        if cold:
            self._drop_from_page_cache()
        before = _bytes_from_device()
        with ThreadPoolExecutor(arm.readers) as pool:
            started = perf_counter()
            list(pool.map(read, range(len(self._paths))))
            seconds = perf_counter() - started
        after = _bytes_from_device()
        return Reading(self.nbytes, seconds, None if before is None or after is None else after - before)

    def _write(self, identity: ChunkIdentity, shape: tuple[int, ...]) -> Path:
        # Random bytes: a device that compresses or deduplicates gains nothing from them.
        noise = torch.randint(256, (*shape[:-1], 2 * shape[-1]), dtype=torch.uint8)
        try:
            self._tier.put(ChunkKV(identity, noise.view(torch.bfloat16)))
        except ChunkUnavailable as error:
            raise EvalError(
                f"The chunk files cannot be written ({error.detail}); free room or lower --files."
            ) from error
        return self._tier.path_of(identity.key, identity.fingerprint, ShardLayout())

    def _by_tier(self, index: int) -> None:
        self._tier.read(self._identities[index], ShardLayout(), lambda shape, dtype: self._memory[index])

    def _plainly(self, index: int) -> None:
        """Read a file as fast as it comes, the tensor's bytes to the same memory as the tier reads them to."""
        memory = tensor_bytes(self._memory[index])
        descriptor = os.open(self._paths[index], os.O_RDONLY)
        try:
            os.preadv(descriptor, [bytearray(self._head_bytes)], 0)
            done = 0
            while done < memory.nbytes:
                done += os.preadv(descriptor, [memory[done : done + READ_BYTES]], self._head_bytes + done)
        finally:
            os.close(descriptor)

    def _drop_from_page_cache(self) -> None:
        for path in self._paths:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


@app.command(help=__doc__)
def disk_bandwidth(
    folder: Annotated[
        Path | None, typer.Option(help="on the disk to measure; the system's for temporary files")
    ] = None,
    files: Annotated[int, typer.Option(min=1, help="chunk files")] = 20,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="tokens of a chunk, 128 KiB each")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="times that every arm is measured")] = 7,
    seed: Annotated[int, typer.Option(help="of the arms' order")] = 0,
    out: Annotated[Path | None, typer.Option(help="file for the result as JSON")] = None,
) -> None:
    """Measure, print the shares, and write them."""
    arguments = {"files": files, "chunk_tokens": chunk_tokens, "rounds": rounds}
    with one_sentence_for_bad_input():
        account = {
            "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": describe_device("cuda" if torch.cuda.is_available() else "cpu"),
            "versions": package_versions(),
            "code": describe_code(REPOSITORY),
            "load_average": os.getloadavg()[0],
            "seed": seed,
            "arguments": arguments,
        }
        cold, warm = _measured(folder, files, chunk_tokens, rounds, seed)
        values = {"bar_cold": BAR, "cold": bandwidths(cold), "warm": bandwidths(warm)}
        _print(values)
        if out is not None:
            _write(out, json.dumps({"provenance": account, **values}, indent=2) + "\n")


def bandwidths(readings: dict[Arm, list[Reading]]) -> dict[str, Any]:
    """The result of all rounds, JSON-ready.

    Returns:
        `device` and `tier`, median bytes a second by number of readers; `share`, the tier's with as many readers as
        serving has over the device's best; `share_of_device_bytes`, the least share of a reading's bytes that came
        from the device (None: this system does not say; above 1 when it reads ahead); `bytes_per_s`, every round's.
    """
    medians = {arm: median(reading.bytes_per_s for reading in rounds) for arm, rounds in readings.items()}
    by_way = {
        way: {arm.readers: medians[arm] for arm in sorted(medians) if arm.way == way} for way in ("device", "tier")
    }
    from_device = [
        None if reading.from_device is None else reading.from_device / reading.nbytes
        for rounds in readings.values()
        for reading in rounds
    ]
    known = [share for share in from_device if share is not None]
    return {
        **by_way,
        "share": by_way["tier"][SERVING_READERS] / max(by_way["device"].values()),
        "share_of_device_bytes": min(known, default=None),
        "bytes_per_s": {
            f"{arm.way}:{arm.readers}": [reading.bytes_per_s for reading in readings[arm]] for arm in sorted(readings)
        },
    }


def _measured(
    folder: Path | None, files: int, chunk_tokens: int, rounds: int, seed: int
) -> tuple[dict[Arm, list[Reading]], dict[Arm, list[Reading]]]:
    arms = [Arm(way, readers) for way in ("device", "tier") for readers in READERS]
    parent = folder or Path(gettempdir())
    try:
        with TemporaryDirectory(prefix="disk-bandwidth-", dir=parent) as scratch:
            return _rounds(Stand(Path(scratch), files, chunk_tokens), arms, rounds, random.Random(seed))
    except OSError as error:
        raise EvalError(f"The folder {parent} cannot be used ({error.strerror}); name another --folder.") from error


def _rounds(
    stand: Stand, arms: Sequence[Arm], rounds: int, order: random.Random
) -> tuple[dict[Arm, list[Reading]], dict[Arm, list[Reading]]]:
    cold: dict[Arm, list[Reading]] = {arm: [] for arm in arms}
    warm: dict[Arm, list[Reading]] = {arm: [] for arm in arms}
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("reading", total=2 * rounds * len(arms))
        for _ in range(rounds):
            for readings, is_cold in ((cold, True), (warm, False)):
                for arm in order.sample(arms, len(arms)):
                    readings[arm].append(stand.read(arm, is_cold))
                    bar.advance(task)
    return cold, warm


def _bytes_from_device() -> int | None:
    """Bytes that this process had storage read so far; None where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _print(values: dict[str, Any]) -> None:
    table = Table("files", "readers", "device GB/s", "tier GB/s")
    for state in ("cold", "warm"):
        for readers in READERS:
            speeds = [f"{values[state][way][readers] / 1e9:.2f}" for way in ("device", "tier")]
            table.add_row(state, str(readers), *speeds)
    print_table(table)
    cold, warm = values["cold"], values["warm"]
    verdict = "reached" if cold["share"] >= BAR else "not reached"
    typer.echo(
        f"The tier with {SERVING_READERS} readers over the device's best: {cold['share']:.2f} cold "
        f"(bar {BAR}: {verdict}), {warm['share']:.2f} warm."
    )
    if cold["share_of_device_bytes"] is not None and cold["share_of_device_bytes"] < 0.9:
        typer.echo("VOID: cold files came from memory; name a --folder on a disk whose page cache can be dropped.")


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    except OSError as error:
        raise EvalError(f"--out {out} cannot be written ({error.strerror}); name a writable file.") from error


if __name__ == "__main__":
    app()
