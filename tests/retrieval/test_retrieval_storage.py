"""An interrupted save leaves the index as it was."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retrieval.errors import RetrievalError
from retrieval.storage import MANIFEST, read_manifest, read_parts, write_index

SAVE_FOREVER = """
import sys
from itertools import count
from pathlib import Path
from retrieval.storage import write_index
for n in count(int(sys.argv[2])):
    write_index(Path(sys.argv[1]), {"n": n}, b"%d" % n * 50_000, [{"n": n}] * 2_000)
"""


def check_consistent(folder: Path) -> int:
    manifest = read_manifest(folder)
    passages, chunks = read_parts(folder, manifest)
    assert passages == b"%d" % manifest["n"] * 50_000
    assert chunks == [{"n": manifest["n"]}] * 2_000
    return manifest["n"]


def test_an_index_whose_saving_is_killed_at_any_instant_is_whole(tmp_path: Path) -> None:
    write_index(tmp_path, {"n": 0}, b"0" * 50_000, [{"n": 0}] * 2_000)
    generator = random.Random(7)
    last = 0
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path), str(last + 1)])
        while read_manifest(tmp_path)["n"] == last and process.poll() is None:
            time.sleep(0.001)
        time.sleep(generator.random() / 20)
        process.kill()
        process.wait()
        saved = check_consistent(tmp_path)
        assert saved > last
        last = saved
    write_index(tmp_path, {"n": 0}, b"0" * 50_000, [{"n": 0}] * 2_000)
    assert len(list(tmp_path.glob("[cp]*"))) == 2


@pytest.mark.parametrize("step", range(6))
def test_a_save_that_fails_at_any_step_leaves_the_old_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Six calls of fsync make a save durable: a file and its folder, for two data files and the manifest."""
    write_index(tmp_path, {"n": 1}, b"1" * 50_000, [{"n": 1}] * 2_000)
    calls = iter(range(100))
    real_fsync = os.fsync

    def fsync_on_a_full_disk(descriptor: int) -> None:
        if next(calls) == step:
            raise OSError(28, "No space left on device")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_on_a_full_disk)
    with pytest.raises(RetrievalError, match=r"cannot be written \(No space left on device\)"):
        write_index(tmp_path, {"n": 2}, b"2" * 50_000, [{"n": 2}] * 2_000)
    # Only the manifest's own folder sync comes after the new index is in place.
    assert check_consistent(tmp_path) == (2 if step == 5 else 1)


def test_the_manifest_names_sizes_and_checksums(tmp_path: Path) -> None:
    write_index(tmp_path, {"n": 1}, b"1", [{"n": 1}])
    files = read_manifest(tmp_path)["files"]
    assert {part: entry["bytes"] for part, entry in files.items()} == {"passages": 1, "chunks": 9}
    assert all(entry["sha256"].startswith(entry["name"].split("-")[1][:32]) for entry in files.values())
    assert (tmp_path / MANIFEST).is_file()
