from __future__ import annotations

import errno
import fcntl
import os
import threading
import time

import pytest
from kvstore_samples import FINGERPRINT, ONE_RANK, chunk_of, identity_of, same, sample

from kvstore import ChunkIdentity, ChunkUnavailable, DiskTier, ShardLayout, StoreError, UnavailableReason
from kvstore.atomic import is_temp_name
from kvstore.disk import write_failure


def path_in(disk: DiskTier, identity: ChunkIdentity, shard: ShardLayout = ONE_RANK):
    return disk.path_of(identity.key, identity.fingerprint, shard)


def flip_last_byte(path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 0x10
    path.write_bytes(raw)


def reason_of(disk: DiskTier, identity: ChunkIdentity, shard: ShardLayout = ONE_RANK) -> UnavailableReason:
    with pytest.raises(ChunkUnavailable) as caught:
        disk.read(identity, shard)
    return caught.value.reason


def test_the_layout_is_root_fingerprint_key_and_shard(tmp_path):
    chunk = sample(1)
    DiskTier(tmp_path).put(chunk)
    expected = tmp_path / FINGERPRINT[:16] / f"{chunk.identity.key}.0of1.safetensors"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [expected]


def test_another_process_reads_what_this_one_wrote(tmp_path, run_python):
    DiskTier(tmp_path).put(sample(1))
    code = (
        "import sys; from pathlib import Path; from kvstore import DiskTier\n"
        "from kvstore_samples import *\n"
        "print(same(DiskTier(Path(sys.argv[1])).read(identity_of(1), ONE_RANK), sample(1)))"
    )
    assert run_python(code, tmp_path).strip() == "True"


def test_a_scan_gives_every_finished_chunk_and_nothing_else(tmp_path):
    disk = DiskTier(tmp_path)
    for seed in range(3):
        disk.put(sample(seed))
    folder = tmp_path / FINGERPRINT[:16]
    (folder / "notes.txt").write_text("not ours")
    (folder / f".{identity_of(9).key}.0of1.safetensors.1.aa.tmp").write_bytes(b"half")
    flip_last_byte(path_in(disk, identity_of(2)))
    path_in(disk, identity_of(7)).write_bytes(b"damaged header" * 9)
    path_in(disk, identity_of(8)).write_bytes(path_in(disk, identity_of(1)).read_bytes())
    assert {header.identity for header in disk.scan()} == {identity_of(0), identity_of(1), identity_of(2)}


def test_a_damaged_file_is_moved_to_quarantine_with_its_reason(tmp_path):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))
    path = path_in(disk, identity_of(1))
    disk.quarantine(path, UnavailableReason.CHECKSUM, "it was flipped")
    assert not path.exists()
    moved = tmp_path / "quarantine" / path.name
    assert moved.exists()
    assert moved.with_suffix(".reason").read_text() == "checksum: it was flipped\n"
    assert reason_of(disk, identity_of(1)) is UnavailableReason.MISSING
    disk.quarantine(path, UnavailableReason.CHECKSUM, "again, which changes nothing")


def test_deleting_frees_the_bytes_and_deleting_again_frees_none(tmp_path):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))
    used = disk.bytes_used()
    key = identity_of(1).key
    assert disk.delete(key, FINGERPRINT, [ONE_RANK]) == used > 0
    assert disk.delete(key, FINGERPRINT, [ONE_RANK]) == 0
    assert disk.bytes_used() == 0


def test_a_sharded_chunk_exists_once_every_rank_has_published(tmp_path):
    disk = DiskTier(tmp_path)
    first, second = (chunk_of(identity_of(1), shard) for shard in ShardLayout(0, 2).all_ranks())
    disk.put(first)
    assert reason_of(disk, first.identity, first.shard) is UnavailableReason.MISSING
    disk.put(second)
    assert same(disk.read(first.identity, first.shard), first)
    assert same(disk.read(first.identity, second.shard), second)


def test_another_tensor_parallel_size_is_its_own_reason(tmp_path):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))
    assert reason_of(disk, identity_of(1), ShardLayout(0, 2)) is UnavailableReason.TP_LAYOUT


def test_a_file_under_another_chunks_name_is_not_served(tmp_path):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))
    path_in(disk, identity_of(2)).write_bytes(path_in(disk, identity_of(1)).read_bytes())
    assert reason_of(disk, identity_of(2)) is UnavailableReason.TOKENS_DIFFER


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_root_that_is_a_file_is_refused_in_one_sentence(tmp_path, below):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"is, or lies below, a file; name a folder\.$"):
        DiskTier(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_that_cannot_be_written_is_unwritable_and_nothing_is_left_behind(tmp_path):
    """A file where the model's folder should be stops every user, root included."""
    disk = DiskTier(tmp_path)
    (tmp_path / FINGERPRINT[:16]).write_text("in the way")
    with pytest.raises(ChunkUnavailable) as caught:
        disk.put(sample(1))
    assert caught.value.reason is UnavailableReason.UNWRITABLE
    assert [path.name for path in tmp_path.rglob("*")] == [FINGERPRINT[:16]]


def test_a_root_that_cannot_be_created_is_refused_when_it_must_be_written():
    """Nobody, root included, creates folders in /proc."""
    with pytest.raises(StoreError, match=r"cannot be written .*; name another folder\.$"):
        DiskTier("/proc/cacheblend-cache", require_writable=True)
    lenient = DiskTier("/proc/cacheblend-cache")
    assert list(lenient.files()) == []
    with pytest.raises(ChunkUnavailable) as caught:
        lenient.put(sample(1))
    assert caught.value.reason is UnavailableReason.UNWRITABLE


def test_opening_for_writing_leaves_nothing_behind(tmp_path):
    DiskTier(tmp_path / "new", require_writable=True)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_full_disk_is_reported_and_leaves_nothing_half_written(tmp_path, run_python):
    """A limit on the size of files makes the kernel refuse the write midway, for every user."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from kvstore import ChunkUnavailable, DiskTier\n"
        "from kvstore_samples import *\n"
        "disk = DiskTier(Path(sys.argv[1])); disk.put(sample(1))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))\n"
        "try: disk.put(sample(2))\n"
        "except ChunkUnavailable as error: print(error.reason.value)\n"
        "print(same(disk.read(identity_of(1), ONE_RANK), sample(1)))"
    )
    assert run_python(code, tmp_path).split() == ["disk_full", "True"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [path_in(DiskTier(tmp_path), identity_of(1))]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, UnavailableReason.DISK_FULL),
        (errno.EDQUOT, UnavailableReason.DISK_FULL),
        (errno.EACCES, UnavailableReason.UNWRITABLE),
        (errno.EROFS, UnavailableReason.UNWRITABLE),
    ],
)
def test_the_kernels_refusals_have_their_reasons(number, reason):
    assert write_failure(OSError(number, "")) is reason


def test_verify_finds_nothing_wrong_with_a_sound_cache(tmp_path):
    disk = DiskTier(tmp_path)
    for seed in range(3):
        disk.put(sample(seed))
    assert disk.verify() == []


def test_verify_names_every_problem_and_changes_nothing(tmp_path):
    disk = DiskTier(tmp_path)
    for seed in range(4):
        disk.put(sample(seed))
    flipped, cut, strange = (path_in(disk, identity_of(seed)) for seed in (1, 2, 9))
    flip_last_byte(flipped)
    cut.write_bytes(cut.read_bytes()[:-5])
    strange.write_bytes(path_in(disk, identity_of(3)).read_bytes())
    leftover = flipped.with_name(f".{flipped.name}.999.abcd.tmp")
    leftover.write_bytes(b"half")
    before = sorted(tmp_path.rglob("*"))
    found = {problem.path: (problem.reason, problem.removable) for problem in disk.verify()}
    assert found == {
        leftover: ("truncated", True),
        flipped: ("checksum", False),
        cut: ("truncated", False),
        strange: ("tokens_differ", False),
    }
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("how", ["prune", "open"])
def test_leftovers_of_killed_writers_are_removed(tmp_path, how):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))
    path = path_in(disk, identity_of(1))
    path.with_name(f".{path.name}.{os.getpid()}.abcd.tmp").write_bytes(b"half")
    if how == "prune":
        assert disk.prune().nbytes == 4
    else:
        DiskTier(tmp_path)
    assert not [file for file in path.parent.iterdir() if is_temp_name(file.name)]
    assert same(disk.read(identity_of(1), ONE_RANK), sample(1))


def test_a_file_that_a_living_writer_holds_is_no_leftover(tmp_path):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))
    path = path_in(disk, identity_of(1))
    temp = path.with_name(f".{path.name}.1.abcd.tmp")
    with open(temp, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert disk.verify() == []
        disk.prune()
        assert temp.exists()
    disk.prune()
    assert not temp.exists()


def test_sweeping_leftovers_never_disturbs_those_who_write(tmp_path):
    disk, done = DiskTier(tmp_path), threading.Event()

    def sweep() -> None:
        while not done.is_set():
            disk.prune()

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for sweeper in sweepers:
        sweeper.start()
    try:
        for seed in range(60):
            disk.put(sample(seed))
    finally:
        done.set()
        for sweeper in sweepers:
            sweeper.join()
    assert {header.identity for header in disk.scan()} == {identity_of(seed) for seed in range(60)}


def aged(disk: DiskTier, seed: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path_in(disk, identity_of(seed)), (then, then))


def test_prune_removes_the_least_recently_used_first(tmp_path):
    disk = DiskTier(tmp_path)
    for seed in range(4):
        disk.put(sample(seed))
        aged(disk, seed, 1000 - seed)
    disk.read(identity_of(0), ONE_RANK)
    one = disk.bytes_used() // 4
    report = disk.prune(max_bytes=2 * one + one // 2)
    assert report.keys == (identity_of(1).key, identity_of(2).key)
    assert {header.identity for header in disk.scan()} == {identity_of(0), identity_of(3)}
    assert disk.bytes_used() <= 2 * one + one // 2


def test_prune_removes_what_was_not_used_for_long(tmp_path):
    disk = DiskTier(tmp_path)
    for seed, age in ((0, 7200), (1, 60)):
        disk.put(sample(seed))
        aged(disk, seed, age)
    assert disk.prune(older_than=3600).keys == (identity_of(0).key,)
    assert disk.prune().keys == ()


def test_prune_removes_all_shards_of_a_chunk_together(tmp_path):
    disk = DiskTier(tmp_path)
    for shard in ShardLayout(0, 2).all_ranks():
        disk.put(chunk_of(identity_of(1), shard))
    used = disk.bytes_used()
    assert disk.prune(max_bytes=used - 1).nbytes == used
    assert disk.bytes_used() == 0


def test_prune_empties_the_quarantine(tmp_path):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))
    disk.quarantine(path_in(disk, identity_of(1)), UnavailableReason.CHECKSUM, "for a test")
    assert disk.bytes_used() > 0
    disk.prune()
    assert disk.bytes_used() == 0


def test_two_processes_fill_one_folder_at_once(tmp_path, run_python):
    """Both write the same chunks over each other while reading them, and the cache stays sound."""
    code = (
        "import os, sys; from pathlib import Path; from kvstore import DiskTier\n"
        "from kvstore_samples import *\n"
        "child = os.fork()\n"
        "disk = DiskTier(Path(sys.argv[1]))\n"
        "for turn in range(5):\n"
        "    for seed in range(20):\n"
        "        disk.put(sample(seed * 10))\n"
        "        assert same(disk.read(identity_of(seed * 10), ONE_RANK), sample(seed * 10))\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )
    run_python(code, tmp_path)
    disk = DiskTier(tmp_path)
    assert disk.verify() == []
    assert len(list(disk.scan())) == 20
    assert disk.temp_files() == []


def test_a_fingerprint_that_names_the_quarantine_is_refused(tmp_path):
    with pytest.raises(StoreError, match="change it"):
        DiskTier(tmp_path).put(sample(1, model="quarantine"))
