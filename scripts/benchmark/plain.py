"""Baselines of training: the usual ways to train and to hold class centres, simple on purpose.

training      as in tutorials: fp32, eager, NCHW images that are drawn once, torch's own PReLU, DDP and SGD with their defaults,
              the head "target-only"
heads         all logits, autograd, a dense gradient, SGD. tutorial: ArcFace as in most tutorials, the margin's formula over all
              logits and a one-hot matrix. target-only: the margin for the targets alone. sampled: Partial FC as in
              arcface_torch's PartialFC_V2, a random number for every class, top-k, sort, the chosen rows copied out and
              differentiated into a gradient of all rows. With several ranks the classes are sharded, embeddings gathered and
              the softmax combined by all-reduces of maximum and sum
Shapes: b = samples of this rank, B = b * world_size, C = classes of this shard, D = embedding size.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from partial_fc.collectives import Collectives
from utils.distributed import World
from utils.image import IMAGE_SIZE

_SCALE, _MARGIN = 64.0, 0.5
KINDS = ("tutorial", "target-only", "sampled")


class PlainHead:
    """One shard of a plain head, with its SGD.

    Args:
        kind: one of KINDS.
        num_classes: C, of this shard; labels outside [start, start + C) belong to other ranks.
        sample_rate: for "sampled".
    """

    def __init__(
        self, kind: str, num_classes: int, dim: int, start: int, world_size: int, sample_rate: float, device: torch.device
    ) -> None:
        self.kind, self.start, self.world_size, self.sample_rate = kind, start, world_size, sample_rate
        self.collectives = Collectives(world_size)
        self.weight = nn.Parameter(torch.randn(num_classes, dim, device=device) * 0.01)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.01, momentum=0.9, weight_decay=5e-4)

    def step(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Forward, backward and update; return the gradient (b, D) of this rank's embeddings."""
        everyone = self.collectives.all_gather(embeddings).detach().requires_grad_()
        labels = self.collectives.all_gather(labels)
        here = (labels >= self.start) & (labels < self.start + len(self.weight))
        local = torch.where(here, labels - self.start, -1)
        weight: Tensor = self.weight
        if self.kind == "sampled":
            weight, local = self._sample(local)
        cosine = F.linear(F.normalize(everyone), F.normalize(weight))
        logits = self._tutorial(cosine, local) if self.kind == "tutorial" else self._target_only(cosine, local)
        if self.world_size > 1:
            loss = _JoinedCrossEntropy.apply(logits, local, self.collectives)
        else:
            loss = F.cross_entropy(logits, local)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        assert everyone.grad is not None
        return self.collectives.reduce_scatter(everyone.grad)

    def _tutorial(self, cosine: Tensor, local: Tensor) -> Tensor:
        sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(0, 1))
        phi = cosine * math.cos(_MARGIN) - sine * math.sin(_MARGIN)
        phi = torch.where(cosine > -math.cos(_MARGIN), phi, cosine - math.sin(math.pi - _MARGIN) * _MARGIN)
        one_hot = torch.zeros_like(cosine)
        rows = (local >= 0).nonzero().squeeze(1)
        one_hot[rows, local[rows]] = 1.0
        return (one_hot * phi + (1.0 - one_hot) * cosine) * _SCALE

    def _target_only(self, cosine: Tensor, local: Tensor) -> Tensor:
        rows = (local >= 0).nonzero().squeeze(1)
        target = torch.cos(torch.acos(cosine[rows, local[rows]].clamp(-1 + 1e-6, 1 - 1e-6)) + _MARGIN)
        return cosine.index_put((rows, local[rows]), target) * _SCALE

    def _sample(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """Return the active rows (K, D), a copy with autograd, and the labels among them."""
        with torch.no_grad():
            positives = torch.unique(local[local >= 0])
            count = max(len(positives), int(self.sample_rate * len(self.weight)))
            priority = torch.rand(len(self.weight), device=self.weight.device)
            priority[positives] = 2.0
            index = torch.topk(priority, k=count)[1].sort()[0]
            renumbered = torch.where(local >= 0, torch.searchsorted(index, local), -1)
        return self.weight[index], renumbered


class _JoinedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy over logits (B, C) whose classes are sharded; label -1: the sample's class is on another rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, collectives: Collectives) -> Tensor:
        maximum = collectives.max(logits.amax(dim=1, keepdim=True))
        exp = torch.exp(logits - maximum)
        probability = exp.div_(collectives.sum(exp.sum(dim=1, keepdim=True)))
        rows = (labels >= 0).nonzero().squeeze(1)
        target = logits.new_zeros(len(logits))
        target[rows] = probability[rows, labels[rows]]
        ctx.save_for_backward(probability, labels)
        return -collectives.sum(target).clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probability, labels = ctx.saved_tensors
        rows = (labels >= 0).nonzero().squeeze(1)
        probability[rows, labels[rows]] -= 1.0
        return probability.mul_(grads[0] / len(probability)), None, None


class PlainTraining:
    """One rank of the loop.

    Args:
        backbone: from (b, 3, S, S) images to (b, D) embeddings; it is changed to torch's own PReLU.
        num_classes: of all ranks together.
        batch: b, images of this rank in a step.
        image_size: S.
    """

    def __init__(
        self, backbone: nn.Module, num_classes: int, embedding_size: int, batch: int, world: World, image_size: int = IMAGE_SIZE
    ) -> None:
        for module in list(backbone.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.PReLU):
                    setattr(module, name, nn.PReLU(child.num_parameters))
        self.device, self.world_size = world.device, world.world_size
        backbone = backbone.to(world.device).train()
        devices = [world.device] if world.device.type == "cuda" else None
        self.backbone = DistributedDataParallel(backbone, device_ids=devices) if world.world_size > 1 else backbone
        shard = num_classes // world.world_size
        arguments = (shard, embedding_size, world.rank * shard, world.world_size, 1.0, world.device)
        self.head = PlainHead("target-only", *arguments)
        self.optimizer = torch.optim.SGD(backbone.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        self.images = torch.randn(batch, 3, image_size, image_size, device=world.device)
        self.labels = torch.randint(shard * world.world_size, (batch,), device=world.device)

    def step(self) -> None:
        """Take one optimizer step."""
        embeddings = self.backbone(self.images)
        gradient = self.head.step(embeddings.detach(), self.labels)
        self.optimizer.zero_grad()
        embeddings.backward(gradient * self.world_size)  # of the mean over all ranks, where DDP takes the mean once more
        nn.utils.clip_grad_norm_(self.backbone.parameters(), 5.0)
        self.optimizer.step()
