"""How scattered rows are divided among the kernel's programs: made once a forward pass, used by every layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from cacheblend.errors import BlendError
from cacheblend.kernels.host_tables import empty_table, on_device
from cacheblend.ragged import places_within

BALANCE = 1.25
"""A tile is cut when it would take this many times a resident program's even share of its request's work."""
MIN_PART_KEYS = 512
"""Keys below which a part is not worth a partial result."""
ASSUMED_PROCESSORS = 132
LARGE_SHARED_MEMORY = 200 * 1024
MAX_HEAD_DIM = 256
REGISTERS_OF_A_PROCESSOR = 65536
MAX_REGISTERS_OF_A_THREAD = 255
WORK_FIELDS, MERGE_FIELDS = 6, 4
NO_PART = -1
"""In place of the index of a partial result, where an item is its whole tile."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The kernel's block sizes.

    Attributes:
        block_m: query vectors of a tile, rows times the query heads of one kv head; a power of two.
        block_n: keys read at a time; a power of two.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline. Keys are found through the block table, which takes every second
            stage: 3 reads keys one block ahead of their use, 5 two.
        resident: programs that shall run on one processor at once; registers are limited to what this allows.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int = 1

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread, None for as many as it likes."""
        allowed = REGISTERS_OF_A_PROCESSOR // (self.resident * self.num_warps * 32) // 8 * 8
        return allowed if allowed < MAX_REGISTERS_OF_A_THREAD else None


@cache
def tile_config(dtype: torch.dtype, head_dim: int, group: int, device: torch.device) -> TileConfig:
    """Choose block sizes that fit the device's registers and shared memory.

    Args:
        dtype: of queries, keys and values.
        head_dim: elements of a head.
        group: query heads of one kv head.
        device: where the kernel will run.

    Returns:
        Fixed choices: tuning at run time would make first calls slow, and results differ from start to start.

    Raises:
        BlendError: heads are larger than a tile can hold.
    """
    if head_dim > MAX_HEAD_DIM:
        raise BlendError(f"head size {head_dim} is above {MAX_HEAD_DIM}: use a selector without scattered rows.")
    config = _base_config(dtype, head_dim, device)
    if group <= config.block_m:
        return config
    return replace(config, block_m=1 << (group - 1).bit_length())


def _base_config(dtype: torch.dtype, head_dim: int, device: torch.device) -> TileConfig:
    if dtype == torch.float32:
        # Exact products run on the ordinary units, where operands soon fill the registers.
        return TileConfig(32 if head_dim <= 128 else 16, 32, 8, 1)
    if not _is_large(device):
        return TileConfig(64, 64 if head_dim <= 128 else 32, 4, 3)
    if head_dim <= 64:
        return TileConfig(128, 64, 4, 5, resident=2)
    return TileConfig(128, 64 if head_dim <= 128 else 32, 8, 5)


def _is_large(device: torch.device) -> bool:
    """Whether it is of a data centre's H100 class; a device that is not CUDA is taken for one."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= LARGE_SHARED_MEMORY


@dataclass(frozen=True, slots=True, eq=False)
class RowTiles:
    """Work of the attention kernel for given rows, the same for every layer of a forward pass.

    A tile is a run of rows of ONE request. Where a request has too few tiles to fill the device, its tiles are cut
    along the keys into parts whose partial results a second kernel merges. Tiles and cuts of a request depend on its
    own rows alone, so that its result never depends on what else is in the batch.

    Attributes:
        work: [items, 6] int32 on the device, longest first: first row, rows, request, first key, end of keys, and the
            index of the partial result or -1 where the item is its whole tile.
        merges: [cut tiles, 4] int32 on the device: first row, rows, first partial result, number of them.
        parts: partial results in all.
        rows: rows in all.
        requests: one more than the largest request index.
        reach: one more than the largest position.
        group: query heads of one kv head.
        config: block sizes that the tiles were made for.
    """

    work: torch.Tensor
    merges: torch.Tensor
    parts: int
    rows: int
    requests: int
    reach: int
    group: int
    config: TileConfig

    @classmethod
    def of(
        cls,
        row_requests: torch.Tensor,
        positions: torch.Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        config: TileConfig | None = None,
    ) -> RowTiles:
        """Divide rows into tiles on the host, and copy the tables to the device.

        Give host tensors where there are some: tensors on a device are fetched first, which waits for the device.

        Args:
            row_requests: [rows] integer, ascending.
            positions: [rows] integer, ascending within a request.
            heads: query heads.
            kv_heads: key/value heads, a divisor of `heads`.
            head_dim: elements of a head.
            dtype: of queries, keys and values.
            device: where the kernel will run.
            config: block sizes; by default `tile_config`'s choice.

        Raises:
            BlendError: rows are not sorted by request and position, a number is negative, or the heads do not divide.
        """
        if kv_heads < 1 or heads % kv_heads:
            raise BlendError(f"{heads} query heads cannot share {kv_heads} kv heads: the first must be a multiple.")
        # In numpy, whose small operations cost a tenth of torch's: the device waits for this.
        requests, places = row_requests.cpu().numpy(), positions.cpu().numpy()
        _require_sorted(requests, places)
        group = heads // kv_heads
        config = config or tile_config(dtype, head_dim, group, device)
        division = divide_rows(requests, places, group, kv_heads, config, processors(device))
        # One copy to the device. Merges come first, because each takes 16 bytes: Triton compiles for tables that start
        # at multiples of that.
        tables = empty_table(division.merges.size + division.work.size, device=device, dtype=torch.int32)
        np.concatenate([division.merges.ravel(), division.work.ravel()], out=tables.numpy())
        placed = on_device(tables, device)
        return cls(
            work=placed[division.merges.size :].view(-1, WORK_FIELDS),
            merges=placed[: division.merges.size].view(-1, MERGE_FIELDS),
            parts=division.parts,
            rows=len(places),
            requests=int(requests[-1]) + 1 if len(requests) else 0,
            reach=int(places.max()) + 1 if len(places) else 0,
            group=group,
            config=config,
        )


class Division(NamedTuple):
    """`RowTiles.work`, `RowTiles.merges` and `RowTiles.parts` on the host."""

    work: np.ndarray
    merges: np.ndarray
    parts: int


def divide_rows(
    requests: np.ndarray, places: np.ndarray, group: int, kv_heads: int, config: TileConfig, processors: int
) -> Division:
    """Tiles of rows, cut along the keys where they are too few.

    Args:
        requests: [rows] integer, ascending.
        places: [rows] integer, ascending within a request.
        group: query heads of one kv head.
        kv_heads: key/value heads.
        config: block sizes.
        processors: of the device.

    Returns:
        For `RowTiles`; the work is sorted.
    """
    return _divide(_tiles_by_request(requests, places, config.block_m // group), kv_heads, config, processors)


def divide_rows_alone(places: np.ndarray, group: int, kv_heads: int, config: TileConfig, processors: int) -> Division:
    """`divide_rows` where all rows are of one request."""
    tiles = [_tiles(0, places, 0, len(places), config.block_m // group)] if len(places) else []
    return _divide(tiles, kv_heads, config, processors)


def _divide(every: Iterable[_Tiles], kv_heads: int, config: TileConfig, processors: int) -> Division:
    work = [np.empty((0, WORK_FIELDS), dtype=np.int32)]
    merges = [np.empty((0, MERGE_FIELDS), dtype=np.int32)]
    parts = 0
    for tiles in every:
        longest = _longest_part(tiles, kv_heads, config, processors)
        if tiles.reach[-1] <= longest:
            work.append(tiles.whole())
            continue
        counts = -(-tiles.reach // longest)
        work.append(tiles.cut(counts, config.block_n, parts))
        merges.append(tiles.merges(counts, parts))
        parts += int(merges[-1][:, 3].sum())
    items = np.concatenate(work)
    # The longest start first, so that the short ones fill the gaps at the end.
    return Division(items[np.argsort(items[:, 3] - items[:, 4], kind="stable")], np.concatenate(merges), parts)


def most_tiles(rows: int, group: int, kv_heads: int, config: TileConfig, processors: int) -> tuple[int, int]:
    """What at most `rows` rows of one request can be divided into; for the other arguments see `divide_rows`.

    Returns:
        The most work items, and the most tiles that are cut.
    """
    tiles = -(-rows // (config.block_m // group))
    # A part is as long as its share and the balance say, less what rounding down to whole keys takes off.
    parts = processors * config.resident / (BALANCE * kv_heads) * (1 + 1 / MIN_PART_KEYS)
    return tiles + int(parts), tiles


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere those of an H100, so that plans can be looked at."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return ASSUMED_PROCESSORS


def _require_sorted(requests: np.ndarray, places: np.ndarray) -> None:
    if len(requests) != len(places):
        raise BlendError(f"{len(requests)} row requests do not fit {len(places)} positions: give one of each a row.")
    # Few rows lie before the one that they follow: the first ones of requests.
    falls = np.flatnonzero(places[1:] < places[:-1])
    if (requests[1:] < requests[:-1]).any() or (requests[falls + 1] == requests[falls]).any():
        raise BlendError("rows are not sorted: sort them by request and by position within a request.")
    if len(requests) and (int(requests[0]) < 0 or int(places.min()) < 0):
        raise BlendError(
            f"request {int(requests[0])} or position {int(places.min())} of a row is negative: count both from 0."
        )


class _Tiles(NamedTuple):
    """A request's rows in runs of consecutive ones, with the keys they reach.

    In numpy and all at once: the device waits for this.

    Attributes:
        request: index.
        first_row, rows, reach: [tiles] int64, in the rows' order.
    """

    request: int
    first_row: np.ndarray
    rows: np.ndarray
    reach: np.ndarray

    def whole(self) -> np.ndarray:
        """[tiles, 6] int32, as `RowTiles.work`: no tile is cut."""
        items = np.empty((len(self.rows), WORK_FIELDS), dtype=np.int32)
        items[:, 0], items[:, 1], items[:, 2] = self.first_row, self.rows, self.request
        items[:, 3], items[:, 4], items[:, 5] = 0, self.reach, NO_PART
        return items

    def cut(self, counts: np.ndarray, block_n: int, first_part: int) -> np.ndarray:
        """[items, 6] int32, as `RowTiles.work`: key ranges of about equal length, which start at multiples of a block.

        Args:
            counts: [tiles] int64, parts of each tile; 1 where it stays whole.
            block_n: keys of a block.
            first_part: index of the first partial result.
        """
        part = places_within(counts)
        count, reach = counts.repeat(counts), self.reach.repeat(counts)
        blocks = -(-reach // block_n)
        items = self.whole().repeat(counts, axis=0)
        items[:, 3] = blocks * part // count * block_n
        items[:, 4] = np.minimum(blocks * (part + 1) // count * block_n, reach)
        is_part = count > 1
        items[is_part, 5] = np.arange(first_part, first_part + np.count_nonzero(is_part))
        return items

    def merges(self, counts: np.ndarray, first_part: int) -> np.ndarray:
        """[cut tiles, 4] int32, as `RowTiles.merges`; see `cut`."""
        cut = np.flatnonzero(counts > 1)
        table = np.empty((len(cut), MERGE_FIELDS), dtype=np.int32)
        own = counts[cut]
        table[:, 0], table[:, 1], table[:, 3] = self.first_row[cut], self.rows[cut], own
        table[:, 2] = first_part + own.cumsum() - own
        return table


def _tiles_by_request(requests: np.ndarray, places: np.ndarray, tile_rows: int) -> Iterator[_Tiles]:
    if not len(requests):
        return
    changes = (np.flatnonzero(requests[1:] != requests[:-1]) + 1).tolist()
    for begin, end in pairwise([0, *changes, len(requests)]):
        yield _tiles(int(requests[begin]), places, begin, end, tile_rows)


def _tiles(request: int, places: np.ndarray, begin: int, end: int, tile_rows: int) -> _Tiles:
    """Of the rows from index `begin` to `end` (exclusive), at least one."""
    first_row = np.arange(begin, end, tile_rows)
    ends = first_row + tile_rows
    ends[-1] = end
    reach = places[ends - 1].astype(np.int64) + 1
    return _Tiles(request, first_row, ends - first_row, reach)


def _longest_part(tiles: _Tiles, kv_heads: int, config: TileConfig, processors: int) -> int:
    share = int(tiles.reach.sum()) * kv_heads / (processors * config.resident)
    keys = max(MIN_PART_KEYS, int(BALANCE * share))
    return -(-keys // config.block_n) * config.block_n
