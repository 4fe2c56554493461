"""Prints what real mxnet reads from a RecordIO set, a JSON line per record. Started by scripts.data.check_with_mxnet.

Runs in the environment of requirements-mxnet.txt, which cannot import this project's packages, so this file imports none.
"""

from __future__ import annotations  # Python 3.8 is enough here

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any


def main() -> int:
    """Parse the command line and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", help="folder with train.rec, and train.idx if the set has one")
    parser.add_argument("--every", type=int, default=1, help="read every N-th record of the index (default 1)")
    options = parser.parse_args()
    import mxnet  # slow, and --help must work without it

    rec, idx = (os.path.join(options.folder, f"train.{ending}") for ending in ("rec", "idx"))
    for key, raw in _records(mxnet.recordio, rec, idx, options.every):
        found: dict[str, Any] = {"key": key}
        if isinstance(raw, Exception):
            found["error"] = str(raw).splitlines()[0][:200]
        else:
            found.update(_describe(mxnet, raw))
        print(json.dumps(found), flush=False)
    return 0


def _records(recordio: Any, rec: str, idx: str, every: int) -> Iterator[tuple[int, Any]]:
    """Yield (key, record) in index order; without an index, in file order, with keys counted from 0."""
    if os.path.exists(idx):
        reader = recordio.MXIndexedRecordIO(idx, rec, "r")
        for key in list(reader.keys)[::every]:
            try:
                yield key, reader.read_idx(key)
            except Exception as error:  # any exception of mxnet is its answer
                yield key, error
        return
    reader = recordio.MXRecordIO(rec, "r")
    number = 0
    while (raw := reader.read()) is not None:
        if number % every == 0:
            yield number, raw
        number += 1


def _describe(mxnet: Any, raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"raw": _hash(raw)}
    try:
        header, payload = mxnet.recordio.unpack(raw)
    except Exception as error:
        return {**found, "error": str(error)[:200]}
    label = [float(value) for value in header.label] if hasattr(header.label, "__len__") else float(header.label)
    found.update(flag=int(header.flag), label=repr(label), id=int(header.id), id2=int(header.id2), payload=_hash(payload))
    if payload:
        try:
            pixels = mxnet.image.imdecode(payload).asnumpy()
            found["pixels"] = [list(pixels.shape), _hash(pixels.tobytes())]
        except Exception:
            found["pixels"] = None
    return found


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


if __name__ == "__main__":
    sys.exit(main())
