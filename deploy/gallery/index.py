"""Finds near vectors with FAISS or hnswlib, where they are installed: faster than matrix products, and not always complete.

The index is built in memory each time a gallery is read. It is never stored: reading such a file would trust whoever wrote it.
Shapes: E = entries, q = queries, D = embedding size.
"""

import importlib
from typing import Any, Protocol

import numpy as np

INDEXES = {"exact": "", "faiss": "faiss-cpu", "hnsw": "hnswlib"}  # names and their packages
_FEW = 10_000  # entries up to which FAISS compares all of them
_LINKS, _BUILD, _SEARCH = 32, 200, 256  # of an HNSW graph: links of an entry, candidates when it is built and searched
_PROBED = 32  # lists that FAISS looks at, of about the square root of the number of entries


class Index(Protocol):
    """A search structure over entries."""

    def nearest(self, queries: np.ndarray, count: int) -> np.ndarray:
        """Return the numbers (q, count) of the entries most similar to each query (q, D); -1 where none was found."""


def build_index(name: str, entries: np.ndarray) -> Index:
    """Return an index over the unit rows (E, D) float32; `name` is "faiss" or "hnsw".

    Raises:
        ValueError: its package is not installed.
    """
    package = INDEXES[name]
    try:
        module = importlib.import_module("faiss" if name == "faiss" else "hnswlib")
    except ImportError:
        raise ValueError(f"--index {name} needs the package {package}: pip install {package}. Or leave --index out") from None
    return _Faiss(module, entries) if name == "faiss" else _Hnsw(module, entries)


class _Faiss:
    """All entries if they are few, else inverted lists around means: only the lists nearest to a query are searched."""

    def __init__(self, faiss: Any, entries: np.ndarray) -> None:
        count, size = entries.shape
        self._index = faiss.IndexFlatIP(size)
        if count > _FEW:
            lists = int(np.sqrt(count))
            self._index = faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, lists, faiss.METRIC_INNER_PRODUCT)
            self._index.nprobe = min(_PROBED, lists)
            self._index.train(entries)
        self._index.add(entries)

    def nearest(self, queries: np.ndarray, count: int) -> np.ndarray:
        return self._index.search(np.ascontiguousarray(queries), count)[1]


class _Hnsw:
    """A graph of neighbours."""

    def __init__(self, hnswlib: Any, entries: np.ndarray) -> None:
        self._index = hnswlib.Index(space="ip", dim=entries.shape[1])
        # one thread: with several the graph depends on their order, and so would what is found
        self._index.init_index(max_elements=len(entries), ef_construction=_BUILD, M=_LINKS, random_seed=0)
        self._index.add_items(entries, np.arange(len(entries)), num_threads=1)

    def nearest(self, queries: np.ndarray, count: int) -> np.ndarray:
        self._index.set_ef(max(_SEARCH, 2 * count))
        found = np.full((len(queries), count), -1, dtype=np.int64)
        for place, query in enumerate(queries):
            # it raises where the graph has no path to so many entries
            for wanted in (count, count // 2, count // 4, 1):
                try:
                    found[place, :wanted] = self._index.knn_query(query, wanted, num_threads=1)[0][0]
                    break
                except RuntimeError:
                    continue
        return found
