"""Writers killed with SIGKILL: nothing half-written is served, and only removable leftovers stay."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from kvstore_samples import chunk_of, identity_of, same

from kvstore import ChunkStore, DiskTier
from kvstore.atomic import is_temp_name

# Imports torch once; then forks a writer for each line it reads, kills it so many milliseconds after its first put,
# and answers.
KILLED_AT_RANDOM = """
import os, signal, sys, time
from pathlib import Path
from kvstore import DiskTier
from kvstore_samples import chunk_of, identity_of

def write_forever(root, begun):
    disk = DiskTier(root)
    while True:
        for seed in range(8):
            disk.put(chunk_of(identity_of(seed * 1000, tokens=128), layers=8, dim=32))
            os.write(begun, b".")

for line in sys.stdin:
    has_begun, begun = os.pipe()
    child = os.fork()
    if child == 0:
        write_forever(Path(sys.argv[1]), begun)
    os.read(has_begun, 1)
    time.sleep(float(line) / 1000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(has_begun)
    os.close(begun)
    print("killed", flush=True)
"""

# Forks writers that kill themselves at the first, second, third ... line that the store's code runs, until one ends.
KILLED_AT_EVERY_LINE = """
import os, signal, sys
from pathlib import Path
from kvstore import DiskTier
from kvstore_samples import sample

def die_at(nth):
    left = nth
    def trace(frame, event, argument):
        nonlocal left
        if "/kvstore/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

disk, chunk = DiskTier(Path(sys.argv[1])), sample(1)
status, nth = 1, 0
while status:
    nth += 1
    child = os.fork()
    if child == 0:
        die_at(nth)
        disk.put(chunk)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    served = list(disk.scan())
    assert not disk.path_of(chunk.identity.key, chunk.identity.fingerprint, chunk.shard).exists() or served
    assert all(problem.removable for problem in disk.verify()), (nth, disk.verify())
print(nth, len(served))
"""


def everything_served_is_right(disk: DiskTier) -> int:
    store = ChunkStore(disk.root, 0)
    identities = [identity_of(seed * 1000, tokens=128) for seed in range(8)]
    here = [identity for identity in identities if store.lookup(identity)]
    assert all(same(store.get(identity), chunk_of(identity, layers=8, dim=32)) for identity in here)
    return len(here)


@pytest.mark.timeout(120)
def test_kill_9_at_random_instants_never_leaves_a_wrong_chunk(tmp_path, python_env):
    disk = DiskTier(tmp_path)
    instants = random.Random(7)
    command = [sys.executable, "-c", KILLED_AT_RANDOM, str(tmp_path)]
    with subprocess.Popen(command, env=python_env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killer:
        for _ in range(15):
            killer.stdin.write(f"{instants.uniform(0, 120)}\n")
            killer.stdin.flush()
            assert killer.stdout.readline() == "killed\n"
            assert all(problem.removable for problem in disk.verify())
        killer.stdin.close()
    assert everything_served_is_right(disk) > 0
    disk.prune()
    assert disk.verify() == []
    assert not [path for path in tmp_path.rglob("*") if is_temp_name(path.name)]


@pytest.mark.timeout(120)
def test_kill_9_at_every_line_of_a_put_never_leaves_a_wrong_chunk(tmp_path, run_python):
    lines, served = map(int, run_python(KILLED_AT_EVERY_LINE, tmp_path).split())
    assert lines > 30
    assert served == 1
    disk = DiskTier(tmp_path)
    assert disk.verify() == []
    assert disk.temp_files() == []
