"""Write down the batch behind a non-finite loss or gradient."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from utils.distributed import World, all_gather_objects

from .base import FaceDataset
from .sampler import Samples


def write_bad_batch(
    path: Path, step: int, why: str, dataset: FaceDataset, samples: Samples, embeddings: Sequence[Tensor], world: World
) -> str:
    """Write the record keys of a global batch to the JSON file `path`; collective.

    Args:
        samples: this rank's samples of the step.
        embeddings: of each of its micro-batches, (b, D).

    Returns:
        A sentence that says where the keys are and which embeddings are bad. Only rank 0 writes, and knows whether that failed.
    """
    finite = torch.cat([rows.detach().float().isfinite().all(dim=1) for rows in embeddings]).tolist()
    mine = [
        {"rank": world.rank, "record": dataset.key(index), "label": dataset.label(index), "embedding_finite": good}
        for index, good in zip(samples.indices.tolist(), finite, strict=True)
    ]
    everyone = [entry for entries in all_gather_objects(mine, world) for entry in entries]
    bad = [entry["record"] for entry in everyone if not entry["embedding_finite"]]
    where = f"are in {path}"
    if world.rank == 0:
        try:
            path.write_text(json.dumps({"step": step, "why": why, "samples": everyone}, indent=1))
        except OSError as error:  # a full disk must not hide the original error
            where = f"could not be written to {path} ({error.strerror})"
    some = "its embeddings are finite"
    if bad:
        some = f"{len(bad)} of its {len(everyone)} embeddings are not finite, the first is that of {bad[0]}"
    return f"The records of its batch {where}: {some}"
