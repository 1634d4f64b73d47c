"""Vectors with ids in FAISS, on a GPU where faiss-gpu finds one."""

from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

# The most neighbours that FAISS selects on a GPU.
_GPU_DEPTH = 2048
# Enough for one question at a time; FAISS would reserve 1.5 GB beside the language model.
_GPU_SCRATCH_BYTES = 64 << 20


class PassageIndex:
    """Vectors compared exactly by inner product.

    The index in main memory is the one that is changed and saved; a GPU holds a copy, made by the first
    search after a change.
    """

    def __init__(self, dimension: int) -> None:
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._gpu_copy: Any = None

    @classmethod
    def from_bytes(cls, data: bytes) -> "PassageIndex":
        """Return the index that ``to_bytes`` gave; RuntimeError if ``data`` is none."""
        loaded = cls.__new__(cls)
        loaded._index = faiss.deserialize_index(np.frombuffer(data, dtype=np.uint8))
        loaded._gpu_copy = None
        return loaded

    def to_bytes(self) -> bytes:
        """Return the index as bytes, the same for the same vectors, ids and order."""
        return faiss.serialize_index(self._index).tobytes()

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._index.d)

    @property
    def ids(self) -> set[int]:
        """The ids of all vectors."""
        return set(faiss.vector_to_array(self._index.id_map).tolist())

    def add(self, vectors: NDArray[np.float32], ids: Sequence[int]) -> None:
        """Add ``vectors``, float32 [n, dimension], under n new ``ids``."""
        if len(ids):
            self._index.add_with_ids(vectors, np.asarray(ids, dtype=np.int64))
            self._gpu_copy = None

    def remove(self, ids: Sequence[int]) -> None:
        """Remove the vectors with these ``ids``."""
        if len(ids):
            self._index.remove_ids(np.asarray(ids, dtype=np.int64))
            self._gpu_copy = None

    def nearest(self, vector: NDArray[np.float32], depth: int) -> list[tuple[int, float]]:
        """Return ids and inner products of the vectors nearest to ``vector``, float32 [dimension], in order.

        ``depth`` says how many; it is at most the number of vectors.
        """
        scores, ids = self._searcher(depth).search(vector[None, :], depth)
        return list(zip(ids[0].tolist(), scores[0].tolist(), strict=True))

    def _searcher(self, depth: int) -> Any:
        if depth > _GPU_DEPTH or faiss.get_num_gpus() == 0:
            return self._index
        if self._gpu_copy is None:
            resources = faiss.StandardGpuResources()
            resources.setTempMemory(_GPU_SCRATCH_BYTES)
            # Kept with the copy: FAISS does not keep the resources alive itself.
            self._gpu_copy = (faiss.index_cpu_to_gpu(resources, 0, self._index), resources)
        return self._gpu_copy[0]
