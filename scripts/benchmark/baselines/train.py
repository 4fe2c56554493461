"""A plain training loop, as in tutorials: fp32, eager, NCHW images, torch's own PReLU, DDP and SGD with their defaults.

Its head is "target-only" of baselines/heads.py: dense, sharded where there are several ranks. Images are drawn once, so its
data cost nothing.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.distributed import World
from utils.image import IMAGE_SIZE

from .heads import PlainHead


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
