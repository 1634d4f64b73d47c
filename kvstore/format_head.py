"""The head of a chunk file: what a file says about itself, and whether that is what was asked for."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.chunk import ChunkKV
from kvstore.errors import UnavailableReason
from kvstore.key import ChunkIdentity, ShardLayout
from kvstore.parallel_read import ByteSource, read_exactly

FORMAT_NAME = "cacheblend-chunk"
FILE_VERSION = "2"
READABLE_VERSIONS = ("1", "2")

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
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
class Head:
    """The safetensors header of a chunk file, taken apart.

    Attributes:
        metadata: all of it, checksum included.
        dtype: "F32", "BF16" or "F16", of the tensor's entry.
        shape: of the tensor's entry.
        nbytes: of the tensor.
        data_start: offset of the tensor's first byte.
    """

    metadata: Mapping[str, str]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data_start: int


class Refused(Exception):
    """The content of a chunk file is wrong, or not what was asked for."""

    def __init__(self, reason: UnavailableReason, detail: str):
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def metadata_of(chunk: ChunkKV) -> dict[str, str]:
    """What a chunk file of the version written says about its chunk, checksum left out."""
    identity = chunk.identity
    return {
        "format": FORMAT_NAME,
        "version": FILE_VERSION,
        "fingerprint": identity.fingerprint,
        "prefix_ids": json.dumps(identity.prefix_ids),
        "token_ids": json.dumps(identity.token_ids),
        "base_position": str(identity.base_position),
        "dtype": _DTYPE_NAMES[chunk.kv.dtype],
        "shape": json.dumps(tuple(chunk.kv.shape)),
        "tp_rank": str(chunk.shard.rank),
        "tp_size": str(chunk.shard.size),
    }


def checksum(metadata: Mapping[str, str], covered: Iterable[bytes | memoryview]) -> str:
    """SHA-256, in hex, of all metadata but the checksum, followed by what is covered."""
    others = {name: value for name, value in metadata.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(others, sort_keys=True, separators=(",", ":")).encode())
    for part in covered:
        digest.update(part)
    return digest.hexdigest()


def read_head(source: ByteSource) -> Head:
    """Read and take apart the header; the tensor's bytes are there in the number that it says.

    Raises:
        Refused: `truncated`, `format_version` or `unreadable`.
        EOFError: the source ends within the header.
        OSError: it cannot be read.
    """
    header_bytes = int.from_bytes(_read(source, 8, 0), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise _unreadable("its header length makes no sense")
    if 8 + header_bytes > source.nbytes:
        raise Refused(UnavailableReason.TRUNCATED, "it ends within its header")
    text = _read(source, header_bytes, 8)
    try:
        head = _parse_head(json.loads(text.decode()), 8 + header_bytes)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unreadable("its header is not that of a chunk file") from error
    # The version decides what everything after it means, so it is judged before anything else is.
    if head.metadata.get("version") not in READABLE_VERSIONS:
        readable = " and ".join(READABLE_VERSIONS)
        detail = f"it has format version {head.metadata.get('version')!r}, this program reads {readable}"
        raise Refused(UnavailableReason.FORMAT_VERSION, detail)
    excess = source.nbytes - head.data_start - head.nbytes
    if excess < 0:
        raise Refused(UnavailableReason.TRUNCATED, f"{-excess} bytes are missing at its end")
    if excess > 0:
        raise _unreadable(f"{excess} bytes follow its end")
    return head


def parse_header(head: Head) -> ChunkHeader:
    """What the head says about the chunk.

    Raises:
        Refused: `unreadable`, when parts are missing or contradict each other.
    """
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


def check_is(header: ChunkHeader, identity: ChunkIdentity, shard: ShardLayout) -> None:
    """Compare what is there with what was asked for.

    Raises:
        Refused: `other_model`, `tp_layout` or `tokens_differ`.
    """
    found = header.identity
    if found.fingerprint != identity.fingerprint:
        raise Refused(UnavailableReason.OTHER_MODEL, f"it was made by model {found.fingerprint[:16]}")
    if header.shard != shard:
        detail = f"it holds rank {header.shard.rank} of {header.shard.size}"
        raise Refused(UnavailableReason.TP_LAYOUT, detail)
    if found != identity:
        raise Refused(UnavailableReason.TOKENS_DIFFER, "it holds other token ids or was made behind another prefix")


def _parse_head(header: Any, data_start: int) -> Head:
    """Take the safetensors header apart; ValueError, TypeError or KeyError if it is no chunk file's."""
    metadata, entry = header["__metadata__"], header["kv"]
    if set(header) != {"__metadata__", "kv"} or metadata["format"] != FORMAT_NAME:
        raise ValueError
    if not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError
    shape = _ints(entry["shape"])
    nbytes = math.prod(shape) * DTYPES[entry["dtype"]].itemsize
    if _ints(entry["data_offsets"]) != (0, nbytes) or min(shape, default=0) < 1:
        raise ValueError
    return Head(metadata, entry["dtype"], shape, nbytes, data_start)


def _read(source: ByteSource, count: int, offset: int) -> bytes:
    buffer = bytearray(count)
    read_exactly(source, memoryview(buffer), offset)
    return bytes(buffer)


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise TypeError
    return tuple(values)


def _unreadable(detail: str) -> Refused:
    return Refused(UnavailableReason.UNREADABLE, detail)
