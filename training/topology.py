"""The topological loss of TopoFR (Dan et al., NeurIPS 2024): embeddings form clusters as the images themselves do.

d_k and e_k are the lengths of the edges of a minimum spanning tree, shortest first: of the images, whose distance is that of
their pixels as a share of the largest possible, and of the embeddings as the network returns them. At these lengths clusters
join where a threshold rises (persistent homology of dimension 0). The loss is sum_k (d_k - e_k)^2 / B. The authors' code
(facechain, face_module/TopoFR) has a tree for each GPU; here one spans the micro-batch of all ranks, so their number is free.

Shapes: b = images of this rank in one micro-batch, B = images of all ranks, D = embedding size.
"""

import math

import torch
from torch import Tensor, nn

from partial_fc.collectives import Collectives

PREFIX = "topology_"  # of the names of the losses


def topology_bytes(backbone: nn.Module, rows: int, count: int, image_size: int, free: int) -> int:
    """Return the bytes of the loss for B = rows images in `count` processes: pixels, and matrices of all pairs.

    Raises:
        ValueError: there are more than `free`, or the backbone cannot shorten its embeddings.
    """
    scale = dict(backbone.named_parameters()).get("features.weight")  # of networks that end in BatchNorm
    if scale is not None and not scale.requires_grad:
        raise ValueError("loss.topology needs backbone.trained_scale=true, which r18 to r2060 have; or mbf, vit_t and the like")
    pixels = 3 * image_size**2
    needed = rows * pixels + 4 * 4 * -(-rows // count) * pixels + 40 * rows**2
    if needed > free:
        raise ValueError(
            f"loss.topology: all pairs of {rows} images need {needed / 2**30:.2f} GiB, {max(0, free) / 2**30:.2f} are free; "
            "raise train.accumulation"
        )
    return needed


def topology_loss(images: Tensor, embeddings: Tensor, rank: int, collectives: Collectives) -> Tensor:
    """Return the loss () of all ranks, whose gradient is this rank's part of its gradient. A collective call.

    The images are (b, H, W, 3) uint8, b the same on all ranks, and their embeddings (b, D) float32.
    """
    shared = collectives.all_gather(embeddings.detach())
    before, _, after = shared.tensor_split((rank * len(embeddings), (rank + 1) * len(embeddings)))
    every = torch.cat([before, embeddings, after])
    centred = shared - shared.mean(dim=0)  # smaller numbers, smaller rounding errors of their squares
    first, second = spanning_tree(torch.cdist(centred, centred))
    lengths = (every[first] - every[second]).norm(dim=1)
    own = images.flatten(1)
    values = own.float() - 127.5
    blocks = collectives.all_gather(own).split(len(own))
    rows = torch.cat([torch.cdist(values, block.float() - 127.5) for block in blocks], dim=1)
    distances = collectives.all_gather(rows) / (255 * math.sqrt(own.shape[1]))  # (B, B), from 0 to 1
    return (distances[spanning_tree(distances)].sort().values - lengths.sort().values).square().sum() / len(shared)


def spanning_tree(distances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends (B - 1,) of the edges of a minimum spanning tree of (B, B) distances, by Boruvka's rounds.

    In each of them every component joins another over its shortest edge; of several, the one with the smallest number. No
    shape depends on the values, so the host waits for no device.
    """
    count = len(distances)
    distances = torch.minimum(distances, distances.t())  # rounding may part the two
    places = torch.arange(count, device=distances.device)
    edges, none = torch.minimum(places[:, None], places) * count + torch.maximum(places[:, None], places), count**2
    component, chosen, rounds = places, places.new_full((count,), -1), (count - 1).bit_length()
    for _ in range(rounds):
        outside = torch.where(component[:, None] == component, math.inf, distances)
        shortest = distances.new_full((count,), math.inf).scatter_reduce(0, component, outside.amin(1), "amin")
        candidates = torch.where((outside == shortest[component][:, None]) & outside.isfinite(), edges, none)
        edge = edges.new_full((count,), none).scatter_reduce(0, component, candidates.amin(1), "amin")
        other = component[edge // count % count] + component[edge % count] - places  # of a component's first place
        other = torch.where(edge < none, other, places)
        joins = (edge < none) & ((edge[other] != edge) | (places > other))  # of two that choose each other, one stays
        chosen, component_of = torch.where(joins, edge, chosen), torch.where(joins, other, places)
        for _ in range(rounds):
            component_of = component_of[component_of]
        component = component_of[component]
    found = chosen.sort().values[1:]  # all but that of the last component
    return found.div(count, rounding_mode="floor"), found.remainder(count)
