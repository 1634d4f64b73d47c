from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_samples import FINGERPRINT, ONE_RANK, chunk_of, identity_of, same, sample

from kvstore import (
    ChunkIdentity,
    ChunkKV,
    ChunkUnavailable,
    ShardLayout,
    StoreError,
    UnavailableReason,
    read_chunk,
    read_header,
    write_chunk,
)


def reason_of(path: Path, identity: ChunkIdentity, shard: ShardLayout = ONE_RANK) -> UnavailableReason:
    with pytest.raises(ChunkUnavailable) as caught:
        read_chunk(path, identity, shard)
    assert caught.value.key == identity.key
    assert str(path) in caught.value.detail
    return caught.value.reason


def rewritten(path: Path, edit) -> None:
    """Rewrite the file's metadata, leaving its checksum as it was."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = edit(dict(file.metadata()))
        kv = file.get_tensor("kv").clone()
    path.write_bytes(safetensors.torch.save({"kv": kv}, metadata))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_chunk_comes_back_bit_for_bit(tmp_path, dtype, tokens):
    chunk = chunk_of(identity_of(3, tokens), ShardLayout(1, 2), dtype)
    write_chunk(tmp_path / "a", chunk)
    assert same(read_chunk(tmp_path / "a", chunk.identity, chunk.shard), chunk)


def test_special_values_come_back_bit_for_bit(tmp_path):
    kv = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).reshape(1, 2, 1, 1, 2)
    chunk = ChunkKV(identity_of(1, 1), kv)
    write_chunk(tmp_path / "a", chunk)
    back = read_chunk(tmp_path / "a", chunk.identity, ONE_RANK)
    assert torch.equal(back.kv.view(torch.int32), kv.view(torch.int32))


def test_the_file_is_what_the_specification_says(tmp_path):
    chunk = chunk_of(ChunkIdentity(FINGERPRINT, (1, 9), (5, 6, 7)), ShardLayout(0, 2), torch.bfloat16)
    write_chunk(tmp_path / "a", chunk)
    with safetensors.safe_open(tmp_path / "a", "pt") as file:
        metadata = file.metadata()
        assert list(file.keys()) == ["kv"]
        assert torch.equal(file.get_tensor("kv"), chunk.kv)
    assert len(metadata.pop("checksum")) == 64
    assert metadata == {
        "format": "cacheblend-chunk",
        "version": "2",
        "fingerprint": FINGERPRINT,
        "prefix_ids": "[1, 9]",
        "token_ids": "[5, 6, 7]",
        "base_position": "2",
        "dtype": "BF16",
        "shape": "[2, 2, 3, 2, 4]",
        "tp_rank": "0",
        "tp_size": "2",
    }


def test_a_header_is_read_without_the_tensor(tmp_path):
    chunk = sample(4)
    write_chunk(tmp_path / "a", chunk)
    damaged = bytearray((tmp_path / "a").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "a").write_bytes(damaged)
    header = read_header(tmp_path / "a")
    assert (header.identity, header.shard, header.dtype) == (chunk.identity, ONE_RANK, "F32")
    assert (header.shape, header.nbytes) == (tuple(chunk.kv.shape), chunk.nbytes)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[ChunkKV, bytes, Path]:
    folder = tmp_path_factory.mktemp("flips")
    chunk = chunk_of(identity_of(3), dtype=torch.bfloat16)
    write_chunk(folder / "a", chunk)
    return chunk, (folder / "a").read_bytes(), folder / "damaged"


@given(data=st.data(), flip=st.integers(1, 255))
@settings(max_examples=400, deadline=None)
def test_a_flipped_byte_anywhere_is_harmless_or_refused(written, data, flip):
    chunk, good, path = written
    offset = data.draw(st.integers(0, len(good) - 1))
    path.write_bytes(good[:offset] + bytes([good[offset] ^ flip]) + good[offset + 1 :])
    try:
        served = read_chunk(path, chunk.identity, chunk.shard)
    except ChunkUnavailable:
        return
    assert same(served, chunk)


@given(data=st.data(), flip=st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_a_flipped_byte_of_the_tensor_is_always_a_checksum_failure(written, data, flip):
    chunk, good, path = written
    offset = data.draw(st.integers(len(good) - chunk.nbytes, len(good) - 1))
    path.write_bytes(good[:offset] + bytes([good[offset] ^ flip]) + good[offset + 1 :])
    assert reason_of(path, chunk.identity) is UnavailableReason.CHECKSUM


def test_a_file_cut_anywhere_is_truncated(written):
    chunk, good, path = written
    data_start = len(good) - chunk.nbytes
    for length in [0, 1, 7, 8, 9, data_start // 2, data_start - 1, data_start, data_start + 1, len(good) - 1]:
        path.write_bytes(good[:length])
        assert reason_of(path, chunk.identity) is UnavailableReason.TRUNCATED, length


def test_bytes_after_the_end_are_refused(written):
    chunk, good, path = written
    path.write_bytes(good + b"\0")
    assert reason_of(path, chunk.identity) is UnavailableReason.UNREADABLE


@pytest.mark.parametrize("content", [b"not a chunk" * 9, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]", b"{}" * 40])
def test_another_kind_of_file_is_unreadable_or_truncated(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    assert reason_of(tmp_path / "a", identity_of(1)) in ("unreadable", "truncated")


def test_a_deeply_nested_header_is_unreadable(tmp_path):
    header = b"[" * 200_000
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header)
    assert reason_of(tmp_path / "a", identity_of(1)) is UnavailableReason.UNREADABLE


def test_an_ordinary_safetensors_file_is_unreadable(tmp_path):
    safetensors.torch.save_file({"kv": torch.zeros(2, 2, 4, 2, 4)}, tmp_path / "a")
    assert reason_of(tmp_path / "a", identity_of(1)) is UnavailableReason.UNREADABLE


def test_a_file_that_is_not_there_is_missing(tmp_path):
    assert reason_of(tmp_path / "a", identity_of(1)) is UnavailableReason.MISSING


def test_a_folder_in_its_place_is_unreadable(tmp_path):
    assert reason_of(tmp_path, identity_of(1)) is UnavailableReason.UNREADABLE


def test_each_kind_of_stranger_has_its_own_reason(tmp_path):
    chunk = sample(4)
    identity = chunk.identity
    write_chunk(tmp_path / "a", chunk)
    other_model = ChunkIdentity("other", identity.prefix_ids, identity.token_ids)
    other_prefix = ChunkIdentity(FINGERPRINT, (8,), identity.token_ids)
    assert reason_of(tmp_path / "a", other_model) is UnavailableReason.OTHER_MODEL
    assert reason_of(tmp_path / "a", identity_of(5)) is UnavailableReason.TOKENS_DIFFER
    assert reason_of(tmp_path / "a", other_prefix) is UnavailableReason.TOKENS_DIFFER
    assert reason_of(tmp_path / "a", identity, ShardLayout(0, 2)) is UnavailableReason.TP_LAYOUT


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("version", "3", "format_version"),
        ("fingerprint", "other", "checksum"),
        ("token_ids", "[5, 6, 7, 8]", "checksum"),
        ("tp_size", "2", "checksum"),
        ("dtype", "F16", "checksum"),
        ("note", "something new", "checksum"),
        ("format", "other", "unreadable"),
    ],
)
def test_edited_metadata_is_refused(tmp_path, name, value, reason):
    chunk = sample(4)
    write_chunk(tmp_path / "a", chunk)
    rewritten(tmp_path / "a", lambda metadata: metadata | {name: value})
    assert reason_of(tmp_path / "a", chunk.identity) == reason


@pytest.mark.parametrize("name", ["checksum", "version", "token_ids", "shape"])
def test_metadata_that_lacks_something_is_refused(tmp_path, name):
    chunk = sample(4)
    write_chunk(tmp_path / "a", chunk)
    rewritten(tmp_path / "a", lambda metadata: {k: v for k, v in metadata.items() if k != name})
    assert reason_of(tmp_path / "a", chunk.identity) in ("checksum", "format_version")


def test_a_tensor_entry_that_contradicts_the_metadata_is_refused(tmp_path):
    """The same bytes under another shape: only the comparison with the checksummed shape can tell."""
    chunk = chunk_of(identity_of(4), heads=2, dim=4)
    write_chunk(tmp_path / "a", chunk)
    raw = (tmp_path / "a").read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    header["kv"]["shape"][3:] = [4, 2]
    edited = json.dumps(header, separators=(",", ":")).encode()
    (tmp_path / "a").write_bytes(len(edited).to_bytes(8, "little") + edited + raw[8 + header_bytes :])
    assert reason_of(tmp_path / "a", chunk.identity) is UnavailableReason.UNREADABLE


def test_writing_leaves_only_the_file(tmp_path):
    write_chunk(tmp_path / "a", sample(1))
    write_chunk(tmp_path / "a", sample(1))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    """Only a power cut could show the difference, so the order of the system calls is looked at instead."""
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda source, target: (calls.append("replace"), replace(source, target)))
    write_chunk(tmp_path / "a", sample(1))
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize(
    "kv",
    [
        torch.zeros(2, 2, 4, 2),
        torch.zeros(2, 3, 4, 2, 4),
        torch.zeros(2, 2, 5, 2, 4),
        torch.zeros(0, 2, 4, 2, 4),
        torch.zeros(2, 2, 4, 2, 4, dtype=torch.float64),
        torch.zeros(2, 2, 4, 4, 2).transpose(3, 4),
    ],
)
def test_a_tensor_that_is_no_chunk_kv_is_refused(kv):
    with pytest.raises(StoreError):
        ChunkKV(identity_of(1, tokens=4), kv)


def test_keys_and_values_of_a_layer_are_views_of_the_chunk():
    chunk = sample(1)
    assert torch.equal(chunk.k(1), chunk.kv[1, 0])
    assert torch.equal(chunk.v(1), chunk.kv[1, 1])
    assert chunk.nbytes == 2 * 2 * 4 * 2 * 4 * 4
