"""The forward pass of a micro-batch over all shards: which sums the ranks exchange, and when.

One all-reduce is enough where the negatives are one scale times the cosine and K is constant: then no chunk depends on the
target class. Other margins need the target cosines first. Shards whose K are their own maxima gather their sums, and each
rank adds them in the same order. So there are never more than two.
Shapes: B = samples of the global micro-batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..collectives import Collectives
from ..margin_like import State
from ..sampling.planning import Chunk
from .batch import Batch, ShardSums
from .loss import GlobalSums
from .passes import TwoPass

Observe = Callable[[Tensor, Tensor], State]


def sums_over_shards(
    passes: TwoPass, collectives: Collectives, batch: Batch, rows: Tensor, chunks: list[Chunk], micro: int, observe: Observe
) -> tuple[Batch, Tensor, ShardSums, GlobalSums]:
    """Return the batch with target cosines, state and function; the rows of all shards; the sums of this shard and of all.

    Args:
        batch: with the target cosines of the samples whose class is in this shard, 0 for the others.
        rows: (k, B) more numbers to add up over the shards, fp32.
        observe: target cosines (B,) and rows, of all shards -> the state of the margin.
    """
    margin = passes.margin
    if margin.linear_negatives and margin.constant_scale and passes.shift is not None:
        if any(chunk.weights is not None for chunk in chunks) or (passes.smooths and not passes.spreads_evenly(batch)):
            batch = batch._replace(function=margin.negatives(batch.target_cosine, batch.norm, {}))
        local = passes.forward(batch, chunks, micro)
        spread = () if local.spread is None else local.spread
        summed = collectives.sum(torch.stack([local.sums[0], batch.target_cosine, *rows, *spread]))
        cosine, rows, log_z = summed[1], summed[2 : 2 + len(rows)], torch.log(summed[0]) + passes.shift
        batch = batch._replace(target_cosine=cosine, state=observe(cosine, rows))
        total = GlobalSums(log_z, local.sums[1:], summed[2 + len(rows) :] if len(spread) else None)
        return batch, rows, local, total
    first = collectives.sum(torch.stack([batch.target_cosine, *rows]))
    cosine, rows = first[0], first[1:]
    batch = batch._replace(target_cosine=cosine, state=observe(cosine, rows))
    batch = batch._replace(function=margin.negatives(cosine, batch.norm, batch.state))
    local = passes.forward(batch, chunks, micro)
    parts = local.sums if local.spread is None else torch.cat([local.sums, local.spread])
    if isinstance(local.shift, Tensor):
        whole = collectives.all_gather(torch.cat([local.shift[None], parts])[None])
        z_sums, summed = whole[:, 1], whole[:, 1:].sum(dim=0)
        log_z = torch.logsumexp(torch.log(z_sums) + whole[:, 0], dim=0)
    else:
        summed = collectives.sum(parts)
        log_z = summed[0] if margin.link == "sum" else torch.log(summed[0]) + local.shift
    return batch, rows, local, GlobalSums(log_z, summed[1:3], summed[3:] if local.spread is not None else None)
