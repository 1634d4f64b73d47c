"""The chunk file, format version 1.

One file holds one chunk, or one tensor-parallel shard of it. It is a safetensors file: an unsigned 64-bit
little-endian header length, a JSON header of that many bytes, and the tensor's bytes up to the end of the
file.

The header holds exactly one tensor, `kv`, of dtype F32, BF16 or F16 and of shape
[layers, 2, tokens, kv_heads, head_dim]; index 0 of the second dimension is K, already rotated at positions
base_position, base_position + 1, ..., and index 1 is V. `__metadata__` maps strings to strings:

    format          "cacheblend-chunk"
    version         "1"
    fingerprint     the model's fingerprint
    prefix_ids      JSON list: token ids the chunk was encoded behind
    token_ids       JSON list: the chunk's own token ids, at least one
    base_position   decimal; equals the number of prefix ids
    dtype           "F32", "BF16" or "F16", as in the tensor's entry
    shape           JSON list, as in the tensor's entry
    tp_rank         decimal, from 0
    tp_size         decimal, at least 1
    checksum        SHA-256 in lower-case hex

The checksum covers the JSON object of all other metadata (keys sorted, separators "," and ":", non-ASCII
escaped), followed by the tensor's bytes. A reader refuses, rather than guesses: another version, a file that
is shorter or longer than its header says, a checksum that does not fit, an identity or a shard other than the
one asked for.

Files are read with plain reads, never mapped: a file that another process truncates must give an error, not a
signal.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from kvstore.atomic import write_atomically
from kvstore.chunk import ChunkKV, tensor_bytes
from kvstore.errors import ChunkUnavailable, UnavailableReason
from kvstore.key import FORMAT_VERSION, ChunkIdentity, ShardLayout

FORMAT_NAME = "cacheblend-chunk"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk file says about itself; its checksum has not been verified.

    `dtype` is "F32", "BF16" or "F16"; `nbytes` counts the tensor, not the file.
    """

    identity: ChunkIdentity
    shard: ShardLayout
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Head:
    metadata: Mapping[str, str]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class _Refused(Exception):
    """The file's own content is wrong."""

    def __init__(self, reason: UnavailableReason, detail: str):
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def write_chunk(path: Path, chunk: ChunkKV) -> None:
    """Write a chunk so that `path` is either whole or untouched, even under kill -9 and power loss.

    Raises:
        OSError: the folder does not take the file; nothing is left behind.
    """
    kv = chunk.kv.detach().cpu()
    metadata = _metadata_of(chunk)
    metadata["checksum"] = _checksum(metadata, kv)
    write_atomically(path, safetensors.torch.save({"kv": kv}, metadata))


def read_chunk(path: Path, identity: ChunkIdentity, shard: ShardLayout) -> ChunkKV:
    """Read and verify everything; what is returned is bit for bit what was written for this identity and
    shard.

    Raises:
        ChunkUnavailable: `missing`, `truncated`, `checksum`, `format_version`, `other_model`, `tp_layout`,
            `tokens_differ` or `unreadable`.
    """
    with _opened(path, identity.key) as file:
        head = _read_head(file)
        kv = _read_tensor(file, head)
        if head.metadata.get("checksum") != _checksum(head.metadata, kv):
            raise _Refused(UnavailableReason.CHECKSUM, "its checksum does not fit its content")
        _check_is(_parse_header(head), identity, shard)
        return ChunkKV(identity, kv, shard)


def read_header(path: Path) -> ChunkHeader:
    """Read what the file says it holds, without reading or verifying the tensor.

    Raises:
        ChunkUnavailable: `missing`, `truncated`, `format_version` or `unreadable`.
    """
    with _opened(path, path.name.partition(".")[0]) as file:
        return _parse_header(_read_head(file))


@contextmanager
def _opened(path: Path, key: str) -> Iterator[io.FileIO]:
    """Open for reading, and say of every failure which file it was and whether the file is to blame."""
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ChunkUnavailable(key, UnavailableReason.MISSING, f"there is no file {path}") from error
    except OSError as error:
        raise ChunkUnavailable(key, UnavailableReason.UNREADABLE, f"{path} cannot be read: {error}") from error
    except _Refused as refused:
        # Another version's file is right for a program of that version.
        damaged = refused.reason is not UnavailableReason.FORMAT_VERSION
        raise ChunkUnavailable(key, refused.reason, f"{path}: {refused.detail}", damaged) from refused


def _metadata_of(chunk: ChunkKV) -> dict[str, str]:
    identity = chunk.identity
    return {
        "format": FORMAT_NAME,
        "version": str(FORMAT_VERSION),
        "fingerprint": identity.fingerprint,
        "prefix_ids": json.dumps(identity.prefix_ids),
        "token_ids": json.dumps(identity.token_ids),
        "base_position": str(identity.base_position),
        "dtype": _DTYPE_NAMES[chunk.kv.dtype],
        "shape": json.dumps(tuple(chunk.kv.shape)),
        "tp_rank": str(chunk.shard.rank),
        "tp_size": str(chunk.shard.size),
    }


def _checksum(metadata: Mapping[str, str], kv: torch.Tensor) -> str:
    others = {name: value for name, value in metadata.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(others, sort_keys=True, separators=(",", ":")).encode())
    digest.update(tensor_bytes(kv))
    return digest.hexdigest()


def _read_head(file: io.FileIO) -> _Head:
    """Read the header and leave the file at the tensor's first byte."""
    file_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    header_bytes = int.from_bytes(_read_exactly(file, 8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise _unreadable("its header length makes no sense")
    if 8 + header_bytes > file_bytes:
        raise _Refused(UnavailableReason.TRUNCATED, "it ends within its header")
    try:
        head = _parse_head(json.loads(_read_exactly(file, header_bytes).decode()))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unreadable("its header is not that of a chunk file") from error
    # The version decides what everything after it means, so it is judged before anything else is.
    if head.metadata.get("version") != str(FORMAT_VERSION):
        detail = f"it has format version {head.metadata.get('version')!r}, this program reads {FORMAT_VERSION}"
        raise _Refused(UnavailableReason.FORMAT_VERSION, detail)
    excess = file_bytes - 8 - header_bytes - head.nbytes
    if excess < 0:
        raise _Refused(UnavailableReason.TRUNCATED, f"{-excess} bytes are missing at its end")
    if excess > 0:
        raise _unreadable(f"{excess} bytes follow its end")
    return head


def _parse_head(header: Any) -> _Head:
    """Take the safetensors header apart; ValueError, TypeError or KeyError if it is no chunk file's."""
    metadata, entry = header["__metadata__"], header["kv"]
    if set(header) != {"__metadata__", "kv"} or metadata["format"] != FORMAT_NAME:
        raise ValueError
    if not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError
    shape = _ints(entry["shape"])
    nbytes = math.prod(shape) * _DTYPES[entry["dtype"]].itemsize
    if _ints(entry["data_offsets"]) != (0, nbytes) or min(shape, default=0) < 1:
        raise ValueError
    return _Head(metadata, entry["dtype"], shape, nbytes)


def _read_tensor(file: io.FileIO, head: _Head) -> torch.Tensor:
    kv = torch.empty(head.shape, dtype=_DTYPES[head.dtype])
    _fill(file, tensor_bytes(kv))
    return kv


def _parse_header(head: _Head) -> ChunkHeader:
    metadata = head.metadata
    try:
        prefix_ids, token_ids = (_ints(json.loads(metadata[name])) for name in ("prefix_ids", "token_ids"))
        identity = ChunkIdentity(metadata["fingerprint"], prefix_ids, token_ids)
        shard = ShardLayout(int(metadata["tp_rank"]), int(metadata["tp_size"]))
        declared = (metadata["dtype"], _ints(json.loads(metadata["shape"])), metadata["base_position"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unreadable("its metadata is incomplete or malformed") from error
    if declared != (head.dtype, head.shape, str(identity.base_position)):
        raise _unreadable("its metadata and its tensor contradict each other")
    if len(head.shape) != 5 or head.shape[1] != 2 or head.shape[2] != len(token_ids):
        raise _unreadable("its tensor is not chunk KV")
    return ChunkHeader(identity, shard, head.dtype, head.shape, head.nbytes)


def _check_is(header: ChunkHeader, identity: ChunkIdentity, shard: ShardLayout) -> None:
    found = header.identity
    if found.fingerprint != identity.fingerprint:
        raise _Refused(UnavailableReason.OTHER_MODEL, f"it was made by model {found.fingerprint[:16]}")
    if header.shard != shard:
        detail = f"it holds rank {header.shard.rank} of {header.shard.size}"
        raise _Refused(UnavailableReason.TP_LAYOUT, detail)
    if found != identity:
        raise _Refused(UnavailableReason.TOKENS_DIFFER, "it holds other token ids or was made behind another prefix")


def _read_exactly(file: io.FileIO, count: int) -> bytes:
    buffer = bytearray(count)
    _fill(file, memoryview(buffer))
    return bytes(buffer)


def _fill(file: io.FileIO, buffer: memoryview) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise _Refused(UnavailableReason.TRUNCATED, "it ends in the middle")
        buffer = buffer[count:]


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise TypeError
    return tuple(values)


def _unreadable(detail: str) -> _Refused:
    return _Refused(UnavailableReason.UNREADABLE, detail)
