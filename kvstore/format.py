"""The chunk file, format version 2.

One file holds one chunk, or one tensor-parallel shard of it. It is a safetensors file: an unsigned 64-bit
little-endian header length, a JSON header of that many bytes, and the tensor's bytes up to the end of the
file.

The header holds exactly one tensor, `kv`, of dtype F32, BF16 or F16 and of shape
[layers, 2, tokens, kv_heads, head_dim]; index 0 of the second dimension is K, already rotated at positions
base_position, base_position + 1, ..., and index 1 is V. `__metadata__` maps strings to strings:

    format          "cacheblend-chunk"
    version         "2"
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
escaped), followed by the XXH3-128 (seed 0, canonical form, 16 bytes each) of every slice of the tensor's bytes,
in order. A slice is 1 MiB; the last may be shorter. It is there to find damage: whoever can change a file on
purpose can change its checksum too, whatever the hash. XXH3 costs a tenth of SHA-256, which on ordinary cores
takes longer than reading, and a slice is hashed while the next is being read.

Version 1, which is read and no longer written, differs in the checksum only: there the metadata's JSON is
followed by the tensor's bytes themselves. The version is that of the file; chunk keys have their own
(`kvstore.key`), so files of both versions are found under the same names.

A reader refuses, rather than guesses: another version, a file that is shorter or longer than its header says,
a checksum that does not fit, an identity or a shard other than the one asked for.

Files are read with plain reads, never mapped: a file that another process truncates must give an error, not a
signal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import safetensors.torch
import torch

from kvstore.atomic import write_atomically
from kvstore.chunk import ChunkKV, tensor_bytes
from kvstore.errors import ChunkUnavailable, StoreError, UnavailableReason
from kvstore.format_head import (
    DTYPES,
    ChunkHeader,
    Head,
    Refused,
    check_is,
    checksum,
    metadata_of,
    parse_header,
    read_head,
)
from kvstore.key import ChunkIdentity, ShardLayout
from kvstore.parallel_read import ByteSource, FileSource, MemorySource, digests, read_and_digest, read_exactly

__all__ = ["Allocate", "ChunkHeader", "chunk_bytes", "parse_chunk", "read_chunk", "read_header", "write_chunk"]

SLICE_BYTES = 1 << 20
"""Part of format version 2."""

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Gives the memory for a chunk of a shape and a dtype: a contiguous CPU tensor, pinned or not, whose content
does not matter. It is called once, before bytes are read; when the chunk is refused afterwards, the memory is
left with rubbish and is the caller's to give back."""


def write_chunk(path: Path, chunk: ChunkKV) -> None:
    """Write a chunk so that `path` is either whole or untouched, even under kill -9 and power loss.

    Raises:
        OSError: the folder does not take the file; nothing is left behind.
    """
    write_atomically(path, chunk_bytes(chunk))


def chunk_bytes(chunk: ChunkKV) -> bytes:
    """The content of the chunk's file."""
    kv = chunk.kv.detach().cpu()
    metadata = metadata_of(chunk)
    metadata["checksum"] = checksum(metadata, digests(tensor_bytes(kv), SLICE_BYTES))
    return safetensors.torch.save({"kv": kv}, metadata)


def read_chunk(path: Path, identity: ChunkIdentity, shard: ShardLayout, allocate: Allocate | None = None) -> ChunkKV:
    """Read and verify everything; what is returned is bit for bit what was written for this identity and
    shard.

    Args:
        path: of the file.
        identity: what the file must hold.
        shard: which shard of it.
        allocate: gives the memory that the bytes are read straight into; without it, ordinary memory is used.

    Raises:
        ChunkUnavailable: `missing`, `truncated`, `checksum`, `format_version`, `other_model`, `tp_layout`,
            `tokens_differ` or `unreadable`.
        StoreError: `allocate` gave memory that does not fit.
        Exception: whatever `allocate` raises.
    """
    with _blaming(str(path), identity.key):
        source = FileSource(path)
    with closing(source):
        return _read(source, str(path), identity, shard, allocate)


def parse_chunk(
    data: bytes | bytearray | memoryview,
    identity: ChunkIdentity,
    shard: ShardLayout,
    allocate: Allocate | None = None,
) -> ChunkKV:
    """The chunk that a file's content holds, verified as a file is; the bytes are copied.

    Args:
        data: the content, as `chunk_bytes` gives it.
        identity: what it must hold.
        shard: which shard of it.
        allocate: gives the memory that the bytes are copied to; without it, ordinary memory is used.

    Raises:
        ChunkUnavailable: the reasons of `read_chunk` but `missing`.
        StoreError: `allocate` gave memory that does not fit.
        Exception: whatever `allocate` raises.
    """
    with closing(MemorySource(data)) as source:
        return _read(source, "what was stored", identity, shard, allocate)


def read_header(path: Path) -> ChunkHeader:
    """Read what the file says it holds, without reading or verifying the tensor.

    Raises:
        ChunkUnavailable: `missing`, `truncated`, `format_version` or `unreadable`.
    """
    with _blaming(str(path), path.name.partition(".")[0]), closing(FileSource(path)) as source:
        return parse_header(read_head(source))


def _read(
    source: ByteSource, name: str, identity: ChunkIdentity, shard: ShardLayout, allocate: Allocate | None
) -> ChunkKV:
    with _blaming(name, identity.key):
        head = read_head(source)
    kv = _destination(head, allocate)
    with _blaming(name, identity.key):
        if head.metadata.get("checksum") != _read_tensor(source, head, tensor_bytes(kv)):
            raise Refused(UnavailableReason.CHECKSUM, "its checksum does not fit its content")
        check_is(parse_header(head), identity, shard)
    return ChunkKV(identity, kv, shard)


def _destination(head: Head, allocate: Allocate | None) -> torch.Tensor:
    shape, dtype = head.shape, DTYPES[head.dtype]
    if allocate is None:
        return torch.empty(shape, dtype=dtype)
    kv = allocate(shape, dtype)
    fits = (tuple(kv.shape), kv.dtype, kv.device.type, kv.is_contiguous()) == (shape, dtype, "cpu", True)
    if not fits:
        raise StoreError(
            f"The memory given for a chunk is {kv.dtype} {list(kv.shape)} on {kv.device}; "
            f"give a contiguous CPU tensor, {dtype} {list(shape)}."
        )
    return kv


def _read_tensor(source: ByteSource, head: Head, buffer: memoryview) -> str:
    """Fill the buffer: the checksum of what was read."""
    if head.metadata["version"] == "1":
        read_exactly(source, buffer, head.data_start)
        return checksum(head.metadata, [buffer])
    return checksum(head.metadata, read_and_digest(source, buffer, head.data_start, SLICE_BYTES))


@contextmanager
def _blaming(name: str, key: str) -> Iterator[None]:
    """Say of every failure which file it was and whether the file is to blame."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ChunkUnavailable(key, UnavailableReason.MISSING, f"there is no file {name}") from error
    except OSError as error:
        raise ChunkUnavailable(key, UnavailableReason.UNREADABLE, f"{name} cannot be read: {error}") from error
    except EOFError as error:
        detail = f"{name}: it ends in the middle"
        raise ChunkUnavailable(key, UnavailableReason.TRUNCATED, detail, damaged=True) from error
    except Refused as refused:
        # Another version's file is right for a program of that version.
        damaged = refused.reason is not UnavailableReason.FORMAT_VERSION
        raise ChunkUnavailable(key, refused.reason, f"{name}: {refused.detail}", damaged) from refused
