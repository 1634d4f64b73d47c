"""Chunk bytes outside of files, memory that the caller gives, files of version 1, and chunks of many slices."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_samples import FINGERPRINT, ONE_RANK, chunk_of, identity_of, same, sample
from xxhash import xxh3_128_digest

from kvstore import format as chunk_format
from kvstore.chunk import ChunkKV, tensor_bytes
from kvstore.disk import DiskTier
from kvstore.errors import ChunkUnavailable, StoreError, UnavailableReason
from kvstore.format import SLICE_BYTES, chunk_bytes, parse_chunk, read_chunk, read_header, write_chunk
from kvstore.key import ChunkIdentity, ShardLayout
from kvstore.parallel_read import FileSource

Reader = Callable[..., ChunkKV]


def as_file(folder: Path) -> Reader:
    def read(data, *arguments):
        (folder / "chunk").write_bytes(data)
        return read_chunk(folder / "chunk", *arguments)

    return read


@pytest.fixture(params=["file", "bytes"])
def reader(request, tmp_path) -> Reader:
    return as_file(tmp_path) if request.param == "file" else parse_chunk


@pytest.fixture(scope="module")
def large() -> tuple[ChunkKV, bytes]:
    """A chunk of five slices, the last of them short."""
    chunk = chunk_of(identity_of(1, tokens=36), layers=30, heads=8, dim=64)
    assert 4 * SLICE_BYTES < chunk.nbytes < 5 * SLICE_BYTES
    return chunk, chunk_bytes(chunk)


def reason_of(reader: Reader, data: bytes, identity: ChunkIdentity, shard: ShardLayout = ONE_RANK):
    with pytest.raises(ChunkUnavailable) as caught:
        reader(data, identity, shard)
    assert caught.value.key == identity.key
    return caught.value.reason, caught.value.damaged


def as_version_1(chunk: ChunkKV) -> bytes:
    """What the first release wrote, made from the words of its specification alone."""
    identity, shard = chunk.identity, chunk.shard
    metadata = {
        "format": "cacheblend-chunk",
        "version": "1",
        "fingerprint": identity.fingerprint,
        "prefix_ids": json.dumps(list(identity.prefix_ids)),
        "token_ids": json.dumps(list(identity.token_ids)),
        "base_position": str(len(identity.prefix_ids)),
        "dtype": "F32",
        "shape": json.dumps(list(chunk.kv.shape)),
        "tp_rank": str(shard.rank),
        "tp_size": str(shard.size),
    }
    covered = json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode() + bytes(tensor_bytes(chunk.kv))
    metadata["checksum"] = hashlib.sha256(covered).hexdigest()
    return safetensors.torch.save({"kv": chunk.kv}, metadata)


def test_a_files_content_and_the_chunks_bytes_are_interchangeable(tmp_path):
    write_chunk(tmp_path / "a", sample(1))
    content = (tmp_path / "a").read_bytes()
    assert len(content) == len(chunk_bytes(sample(1)))
    assert same(parse_chunk(content, identity_of(1), ONE_RANK), sample(1))
    assert same(as_file(tmp_path)(chunk_bytes(sample(1)), identity_of(1), ONE_RANK), sample(1))


def test_the_checksum_is_what_the_specification_says(large):
    data = large[1]
    header_bytes = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + header_bytes])["__metadata__"]
    found = metadata.pop("checksum")
    covered = json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()
    tensor = data[8 + header_bytes :]
    for start in range(0, len(tensor), 1 << 20):
        covered += xxh3_128_digest(tensor[start : start + (1 << 20)])
    assert found == hashlib.sha256(covered).hexdigest()


def test_a_chunk_of_many_slices_comes_back_bit_for_bit(reader, large):
    chunk, data = large
    assert same(reader(data, chunk.identity, ONE_RANK), chunk)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_of_bytes_is_parsed_and_not_kept(kind):
    data = bytearray(chunk_bytes(sample(1)))
    chunk = parse_chunk(kind(data), identity_of(1), ONE_RANK)
    data[:] = bytes(len(data))
    assert same(chunk, sample(1))


def test_a_flipped_byte_in_any_slice_is_found(reader, large):
    chunk, data = large
    start = len(data) - chunk.nbytes
    borders = [start + index * SLICE_BYTES for index in range(5)]
    for offset in {*borders, *(border - 1 for border in borders[1:]), len(data) - 1}:
        flipped = bytearray(data)
        flipped[offset] ^= 0x40
        assert reason_of(reader, flipped, chunk.identity) == (UnavailableReason.CHECKSUM, True), offset


def test_two_slices_that_changed_places_are_found(reader, large):
    chunk, data = large
    start = len(data) - chunk.nbytes
    first, second = data[start : start + SLICE_BYTES], data[start + SLICE_BYTES : start + 2 * SLICE_BYTES]
    swapped = data[:start] + second + first + data[start + 2 * SLICE_BYTES :]
    assert reason_of(reader, swapped, chunk.identity) == (UnavailableReason.CHECKSUM, True)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_bytes_cut_anywhere_are_truncated(data):
    good = chunk_bytes(sample(2))
    length = data.draw(st.integers(0, len(good) - 1))
    assert reason_of(parse_chunk, good[:length], identity_of(2)) == (UnavailableReason.TRUNCATED, True)


def test_every_stranger_has_the_reason_that_a_file_gives_it(reader):
    data = chunk_bytes(sample(1))
    other_model = ChunkIdentity("other", (1,), identity_of(1).token_ids)
    assert reason_of(reader, data, other_model) == (UnavailableReason.OTHER_MODEL, True)
    assert reason_of(reader, data, identity_of(2)) == (UnavailableReason.TOKENS_DIFFER, True)
    assert reason_of(reader, data, identity_of(1), ShardLayout(0, 2)) == (UnavailableReason.TP_LAYOUT, True)
    assert reason_of(reader, data + b"\0", identity_of(1)) == (UnavailableReason.UNREADABLE, True)
    newer = data.replace(b'"version":"2"', b'"version":"3"')
    assert reason_of(reader, newer, identity_of(1)) == (UnavailableReason.FORMAT_VERSION, False)


@given(tokens=st.integers(1, 40), slice_bytes=st.sampled_from([16, 64, 96, 128]), dtype=st.sampled_from(["f", "b"]))
@settings(max_examples=50, deadline=None)
def test_chunks_of_any_size_come_back_bit_for_bit_whatever_the_slice(tokens, slice_bytes, dtype):
    """32 or 64 bytes a token and layer: sizes fall on, before and after the borders of slices."""
    chunk = chunk_of(identity_of(1, tokens), dtype=torch.float32 if dtype == "f" else torch.bfloat16, layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_format, "SLICE_BYTES", slice_bytes)
        assert same(parse_chunk(chunk_bytes(chunk), chunk.identity, ONE_RANK), chunk)


def test_files_of_version_1_are_still_served_under_the_same_name(tmp_path):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))
    path = disk.path_of(identity_of(1).key, FINGERPRINT, ONE_RANK)
    path.write_bytes(as_version_1(sample(1)))
    assert same(disk.read(identity_of(1), ONE_RANK), sample(1))
    assert [header.identity for header in disk.scan()] == [identity_of(1)]
    assert disk.verify() == []


def test_a_flipped_byte_in_a_file_of_version_1_is_found(reader):
    data = bytearray(as_version_1(sample(1)))
    data[-5] ^= 1
    assert reason_of(reader, data, identity_of(1)) == (UnavailableReason.CHECKSUM, True)


@pytest.mark.parametrize(("old", "new"), [(b'"version":"1"', b'"version":"2"'), (b'"version":"2"', b'"version":"1"')])
def test_bytes_of_one_version_do_not_pass_as_the_other(reader, old, new):
    data = as_version_1(sample(1)) if b"1" in old else chunk_bytes(sample(1))
    assert reason_of(reader, data.replace(old, new), identity_of(1)) == (UnavailableReason.CHECKSUM, True)


def test_bytes_go_straight_to_the_memory_that_was_given(reader, large):
    chunk, data = large
    given_memory = torch.empty(chunk.kv.shape)
    asked: list[tuple[object, ...]] = []

    def allocate(shape, dtype):
        asked.append((shape, dtype))
        return given_memory

    served = reader(data, chunk.identity, ONE_RANK, allocate)
    assert asked == [(tuple(chunk.kv.shape), torch.float32)]
    assert served.kv.data_ptr() == given_memory.data_ptr()
    assert same(served, chunk)


def test_a_part_of_a_larger_pool_is_filled_and_its_neighbours_are_left_alone():
    pool = torch.full((3, *sample(1).kv.shape), 7.0)
    served = parse_chunk(chunk_bytes(sample(1)), identity_of(1), ONE_RANK, lambda shape, dtype: pool[1])
    assert same(served, sample(1))
    assert bool((pool[0] == 7).all() and (pool[2] == 7).all())


@pytest.mark.parametrize(
    "wrong",
    [
        torch.empty(2, 2, 4, 2, 5),
        torch.empty(128),
        torch.empty(2, 2, 4, 2, 4, dtype=torch.float16),
        torch.empty(2, 2, 4, 4, 2).transpose(3, 4),
        torch.empty(2, 2, 4, 2, 4, device="meta"),
    ],
    ids=["shape", "flat", "dtype", "strides", "device"],
)
def test_memory_that_does_not_fit_is_refused_in_one_sentence(reader, wrong):
    with pytest.raises(StoreError, match=r"^The memory given .*; give a contiguous CPU tensor, torch.float32 .*\.$"):
        reader(chunk_bytes(sample(1)), identity_of(1), ONE_RANK, lambda shape, dtype: wrong)


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "no memory"), FileNotFoundError(2, "no such pool")])
def test_an_allocate_that_raises_is_heard_unchanged_and_leaves_nothing_open(tmp_path, error):
    disk = DiskTier(tmp_path)
    disk.put(sample(1))

    def allocate(shape, dtype):
        raise error

    before, threads = os.listdir("/proc/self/fd"), threading.active_count()
    with pytest.raises(type(error)) as caught:
        disk.read(identity_of(1), ONE_RANK, allocate)
    assert caught.value is error
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (len(before), threads)
    assert same(disk.read(identity_of(1), ONE_RANK), sample(1))


def test_memory_is_asked_for_only_when_the_file_is_all_there(reader):
    asked: list[object] = []
    for data in (b"", chunk_bytes(sample(1))[:-1], b"not a chunk" * 9):
        with pytest.raises(ChunkUnavailable):
            reader(data, identity_of(1), ONE_RANK, lambda *arguments: asked.append(arguments))
    assert asked == []


def test_a_file_that_is_cut_while_it_is_read_is_truncated(tmp_path, large):
    """`allocate` runs when the size was looked at and before bytes are read: the file is cut just then."""
    chunk, data = large
    path = tmp_path / "a"
    for length in (len(data) - 1, len(data) - 2 * SLICE_BYTES, len(data) - chunk.nbytes, 0):
        path.write_bytes(data)

        def cut(shape, dtype, length=length):
            os.truncate(path, length)
            return torch.empty(shape, dtype=dtype)

        with pytest.raises(ChunkUnavailable) as caught:
            read_chunk(path, chunk.identity, ONE_RANK, cut)
        assert (caught.value.reason, caught.value.damaged) == (UnavailableReason.TRUNCATED, True)
        assert str(path) in caught.value.detail


def test_a_file_that_is_replaced_while_it_is_read_is_served_as_it_was(tmp_path, large):
    chunk, data = large
    path = tmp_path / "a"
    path.write_bytes(data)

    def replace(shape, dtype):
        write_chunk(path, sample(9))
        return torch.empty(shape, dtype=dtype)

    assert same(read_chunk(path, chunk.identity, ONE_RANK, replace), chunk)


def test_an_error_of_the_disk_in_the_middle_of_a_file_is_unreadable_and_not_damage(tmp_path, large, monkeypatch):
    """The one thing that no file can be made to do: the kernel's error is put in its place."""
    chunk, data = large
    (tmp_path / "a").write_bytes(data)
    real = FileSource.read_into

    def read_into(self, buffer, offset):
        if offset > 3 * SLICE_BYTES:
            raise OSError(5, "Input/output error")
        return real(self, buffer, offset)

    monkeypatch.setattr(FileSource, "read_into", read_into)
    with pytest.raises(ChunkUnavailable) as caught:
        read_chunk(tmp_path / "a", chunk.identity, ONE_RANK)
    assert (caught.value.reason, caught.value.damaged) == (UnavailableReason.UNREADABLE, False)
    assert read_header(tmp_path / "a").identity == chunk.identity
