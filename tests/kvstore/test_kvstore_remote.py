from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kvstore_samples import FINGERPRINT, ONE_RANK, chunk_of, identity_of, same, sample
from redis_server import RedisServer
from remote_samples import failure, key_of

from kvstore import ChunkKV, ShardLayout, StoreError, UnavailableReason, remote
from kvstore.format import chunk_bytes, parse_chunk
from kvstore.remote import RemoteTier


@pytest.fixture
def tier(server):
    tier = RemoteTier(server.url, timeout_s=20)
    yield tier
    tier.close()


@pytest.fixture
def small_parts(monkeypatch):
    """Chunks of a few hundred bytes have many parts and take many round trips."""
    monkeypatch.setattr(remote, "PART_BYTES", 64)


def keys_on(server: RedisServer) -> set[str]:
    with server.client() as client:
        return set(map(bytes.decode, client.keys("*")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_bit_for_bit_what_was_put(tier, dtype):
    chunk = chunk_of(identity_of(1), dtype=dtype)
    tier.put(chunk)
    assert same(tier.read(chunk.identity, ONE_RANK), chunk)


def test_a_chunk_of_many_parts_is_read_bit_for_bit(tier, server):
    chunk = chunk_of(identity_of(1, tokens=300), layers=8, heads=8, dim=128)
    tier.put(chunk)
    with server.client() as client:
        assert client.hlen(key_of(chunk.identity)) > remote.PARTS_A_TRIP + 1
    assert same(tier.read(chunk.identity, ONE_RANK), chunk)


def test_the_parts_together_are_a_chunk_file_and_stay_until_the_server_drops_them(tier, server, small_parts):
    chunk = sample(1)
    tier.put(chunk)
    assert keys_on(server) == {key_of(chunk.identity)}
    with server.client() as client:
        fields = client.hgetall(key_of(chunk.identity))
        assert client.ttl(key_of(chunk.identity)) == -1
    del fields[b"head"]
    parts = [fields[name] for name in sorted(fields, key=lambda name: int(name.rpartition(b":")[2]))]
    assert len(parts) > 2 * remote.PARTS_A_TRIP
    assert same(parse_chunk(b"".join(parts), chunk.identity, ONE_RANK), chunk)


def test_another_process_reads_what_this_one_put(tier, server, run_python):
    tier.put(sample(1))
    code = (
        "import sys; from kvstore.remote import RemoteTier\n"
        "from kvstore_samples import *\n"
        "print(same(RemoteTier(sys.argv[1], timeout_s=20).read(identity_of(1), ONE_RANK), sample(1)))"
    )
    assert run_python(code, server.url).strip() == "True"


def test_what_was_never_put_is_missing_and_not_held(tier):
    assert tier.holds(identity_of(1), ONE_RANK) is None
    assert failure(tier.read, identity_of(1), ONE_RANK).reason is UnavailableReason.MISSING


def test_a_held_chunk_tells_the_bytes_of_its_kv(tier):
    tier.put(sample(1))
    assert tier.holds(identity_of(1), ONE_RANK) == sample(1).nbytes


def test_the_memory_that_is_given_is_filled(tier):
    tier.put(sample(1))
    memory = torch.full(sample(1).kv.shape, float("nan"))
    chunk = tier.read(identity_of(1), ONE_RANK, lambda shape, dtype: memory)
    assert chunk.kv is memory
    assert same(chunk, sample(1))


def test_no_memory_is_an_error_of_the_caller_and_the_next_read_is_served(tier):
    tier.put(sample(1))

    def no_memory(shape, dtype):
        raise MemoryError

    with pytest.raises(MemoryError):
        tier.read(identity_of(1), ONE_RANK, no_memory)
    assert same(tier.read(identity_of(1), ONE_RANK), sample(1))


def test_a_chunk_that_one_of_two_ranks_wrote_is_not_held(tier):
    first, second = (chunk_of(identity_of(1), shard) for shard in ShardLayout(0, 2).all_ranks())
    tier.put(first)
    assert tier.holds(first.identity, first.shard) is None
    assert failure(tier.read, first.identity, first.shard).reason is UnavailableReason.MISSING
    tier.put(second)
    assert tier.holds(first.identity, first.shard) == first.nbytes
    assert same(tier.read(first.identity, first.shard), first)
    assert same(tier.read(first.identity, second.shard), second)


def test_deleting_frees_the_stored_bytes_and_deleting_again_frees_none(tier, server):
    chunks = [chunk_of(identity_of(1), shard) for shard in ShardLayout(0, 2).all_ranks()]
    for chunk in chunks:
        tier.put(chunk)
    shards = [chunk.shard for chunk in chunks]
    stored = sum(len(chunk_bytes(chunk)) for chunk in chunks)
    assert tier.delete(chunks[0].identity.key, FINGERPRINT, shards) == stored
    assert tier.delete(chunks[0].identity.key, FINGERPRINT, shards) == 0
    assert keys_on(server) == set()


def test_deleting_no_shards_frees_nothing(tier):
    tier.put(sample(1))
    assert tier.delete(identity_of(1).key, FINGERPRINT, []) == 0
    assert tier.holds(identity_of(1), ONE_RANK)


def test_what_is_put_again_replaces_what_was_there(tier, server, small_parts):
    tier.put(sample(1))
    other = ChunkKV(identity_of(1), sample(1).kv + 1)
    tier.put(other)
    assert same(tier.read(identity_of(1), ONE_RANK), other)
    assert keys_on(server) == {key_of(identity_of(1))}


def test_threads_read_what_they_ask_for(tier, small_parts):
    for seed in range(12):
        tier.put(sample(seed))
    with ThreadPoolExecutor(6) as pool:
        read = pool.map(lambda seed: tier.read(identity_of(seed % 12), ONE_RANK), range(120))
        assert all(same(chunk, sample(i % 12)) for i, chunk in enumerate(read))


def test_a_chunk_that_is_written_while_it_is_read_is_one_writing_or_another_and_never_a_mix(tier, small_parts):
    writings = [ChunkKV(identity_of(1), sample(1).kv + i) for i in range(3)]
    tier.put(writings[0])
    done = threading.Event()

    def write(chunk):
        while not done.is_set():
            tier.put(chunk)

    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(write, chunk) for chunk in writings]
        readers = [pool.submit(lambda: [tier.read(identity_of(1), ONE_RANK) for _ in range(60)]) for _ in range(3)]
        try:
            chunks = [chunk for reader in readers for chunk in reader.result()]
        finally:
            done.set()
        for writer in writers:
            writer.result()
    assert all(any(same(chunk, writing) for writing in writings) for chunk in chunks)


def test_a_database_a_user_and_a_password_are_taken_from_the_url(tmp_path):
    server = RedisServer(tmp_path, requirepass="p@ss/word").start()
    try:
        tier = RemoteTier(f"redis://default:p%40ss%2Fword@127.0.0.1:{server.port}/3", timeout_s=20)
        tier.put(sample(1))
        assert same(tier.read(identity_of(1), ONE_RANK), sample(1))
        with server.client() as client:
            assert "db3" in client.info("keyspace")
        wrong = RemoteTier(f"redis://default:not-the-word@127.0.0.1:{server.port}/3", timeout_s=20)
        error = failure(wrong.read, identity_of(1), ONE_RANK)
        assert error.reason is UnavailableReason.UNREACHABLE
        assert "password" in str(error)
        assert "not-the-word" not in str(error)
    finally:
        server.kill()


def test_options_of_the_client_that_would_change_bytes_change_none(server):
    tier = RemoteTier(f"{server.url}?decode_responses=true&protocol=3&encoding=latin-1", timeout_s=20)
    tier.put(sample(1))
    assert same(tier.read(identity_of(1), ONE_RANK), sample(1))


def test_a_unix_socket_serves_as_well(tmp_path):
    server = RedisServer(tmp_path, unixsocket=str(tmp_path / "s")).start()
    try:
        tier = RemoteTier(f"unix://{tmp_path / 's'}", timeout_s=20)
        tier.put(sample(1))
        assert same(tier.read(identity_of(1), ONE_RANK), sample(1))
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://cache:6379", "http://cache:6379"),
        ("cache:6379", "cache:6379"),
        ("redis:/:secret@cache:6379", "cache:6379"),
        ("", ""),
        ("redis://", "redis://"),
        ("redis://cache:port/0", "redis://cache:port/0"),
        ("redis://cache:6379/first", "redis://cache:6379/first"),
        ("redis://user:secret@cache:6379/first", "redis://cache:6379/first"),
        ("redis://:sec/ret@cache:6379/0", "redis://cache:6379/0"),
        ("redis://:a://secret@cache:6379/x", "redis://cache:6379/x"),
        ("redis://:sec#ret@cache:6379/0", "redis://..."),
        ("redis://:sec?ret@cache:6379/0", "redis://..."),
        ("redis://cache:6379/0?password=secret&no_such_option=1", "redis://cache:6379/0"),
        ("redis://cache:6379/0?password=sec@ret&no_such_option=1", "redis://..."),
        ("redis://cache:6379/0?socket_timeout=soon", "redis://cache:6379/0"),
        ("redis://cache:6379/0?socket_timeout=0", "redis://cache:6379/0"),
    ],
)
def test_a_wrong_url_is_refused_in_one_sentence_that_names_it_without_its_password(url, shown):
    with pytest.raises(StoreError) as caught:
        RemoteTier(url)
    message = str(caught.value)
    assert message.startswith(f"The remote tier's URL {shown!r} is not one of a Redis server; give redis://HOST")
    assert message.endswith(".")
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_without_the_clients_package_the_error_says_what_to_install(run_python):
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "from kvstore import StoreError; from kvstore.remote import RemoteTier\n"
        "try: RemoteTier('redis://cache:6379/0')\n"
        "except StoreError as error: print(error)"
    )
    assert run_python(code).strip().endswith("which is not installed; pip install 'cacheblend-rag[remote]'.")
