"""KP-RPE: a vision transformer whose attention depends on where its tokens lie relative to five landmarks of the face.

Sources: Kim et al., "KeyPoint Relative Position Encoding for Face Recognition", CVPR 2024, https://arxiv.org/abs/2403.14852,
in the form of its published networks: a number for each block, head, query and bucket of the offset between query and key is
added to the logits of the attention, and is a linear function of the query's place relative to the landmarks. The buckets are
those of Wu et al., "Rethinking and Improving Relative Position Encoding for Vision Transformer", ICCV 2021,
https://arxiv.org/abs/2107.14222, Equation 18, product method. Parameter names, shapes and initial values are those of CVLface
(mk-minchul/CVLface, models/vit_kprpe); `landmarks` is added here: there another network finds the landmarks of each image.
Shapes: b = images of this rank, S = image_size, 112 unless said otherwise, N = tokens, 196 of an image of 112 x 112, h =
heads, C = numbers per token, D = embedding size. Landmarks (., 5, 2) are x and y as shares of the side, the middle of the
first pixel at 0.5 / S, in the order of utils/alignment.py.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.alignment import TEMPLATE
from utils.image import IMAGE_SIZE

from .iresnet import autocast_off, check_images
from .vit import Form, TransformerBlock, VisionTransformer

_ALPHA, _BETA, _GAMMA = 1.9, 3.8, 15.2  # 1, 2 and 8 times the ratio of the published networks
_SIDE = 2 * int(_BETA) + 1  # buckets of an offset along one axis
_WIDTHS = (3, 16, 32, 64, 16)  # channels of the network that finds the landmarks
_UNIT = 0.1  # of its last layer, as a share of the side: AdamW moves each of its many weights by the rate in a step


class FindLandmarks(nn.Module):
    """Finds the landmarks in aligned faces, with four strided convolutions; at first they are those of the template."""

    template: Tensor

    def __init__(self, image_size: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(_WIDTHS):
            layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.points = nn.Linear(_WIDTHS[-1] * (image_size // 16) ** 2, 10)
        nn.init.zeros_(self.points.weight)
        nn.init.zeros_(self.points.bias)
        with torch.device("cpu"):  # to compute on the device meta, torch would import its compiler: two seconds of each start
            template = (torch.tensor(TEMPLATE, dtype=torch.float32) + 0.5) / IMAGE_SIZE
        self.register_buffer("template", template.to(self.points.weight.device), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return (b, 5, 2) from (b, 3, S, S)."""
        return self.template + _UNIT * self.points(self.features(images)).unflatten(1, (5, 2))


def landmark_error(found: Tensor, given: Tensor) -> Tensor:
    """Return the sum of absolute differences () of landmarks (b, 5, 2); those that were not given, NaN, count 0."""
    return torch.where(given.isnan(), 0.0, (found - given).abs()).sum()


def buckets(side: int) -> Tensor:
    """Return the bucket (N, N) int64 in [0, 49) of the offset from each query to each key of side x side tokens."""
    offset = torch.arange(side)[:, None] - torch.arange(side).double()
    log = torch.log(offset.abs().clamp(min=_ALPHA) / _ALPHA) / math.log(_GAMMA / _ALPHA)
    far = (_ALPHA + log * (_BETA - _ALPHA)).round().clamp(max=int(_BETA))
    along = torch.where(offset.abs() > _ALPHA, offset.sign() * far, offset).long() + _SIDE // 2
    return (along[:, None, :, None] * _SIDE + along[None, :, None, :]).reshape(side**2, side**2)


class KeypointBlock(TransformerBlock):
    """A block of the transformer whose attention has the bias of KP-RPE."""

    def compute(self, x: Tensor, away: Tensor, table: Tensor, bucket: Tensor) -> Tensor:  # type: ignore[override]
        """Return (b, N, C) from (b, N, C).

        Args:
            away: (b, N, 11), the place of each token relative to each landmark, and 1.
            table: (h, 49, 11), the linear function for each head and bucket.
            bucket: (N, N) int64.
        """
        with autocast_off(x.device.type):  # 16 bits would round places to a fifth of a pixel
            of_pairs = F.embedding(bucket, table.transpose(0, 1).flatten(1)).unflatten(2, table.shape[::2])  # (N, N, h, 11)
            bias = torch.einsum("bic,ijhc->bhij", away, of_pairs)
        return super().compute(x, bias)


class KeypointTransformer(VisionTransformer):
    """A vision transformer that knows the places of eyes, nose and mouth (KP-RPE): for faces that are not well aligned.

    Args:
        form, width, dropout, drop_path, image_size: as in VisionTransformer.
    """

    papers = ("2403.14852", "2107.14222")
    block = KeypointBlock
    bucket: Tensor
    places: Tensor

    def __init__(
        self, form: Form, embedding_size: int = 512, width: float = 1.0, dropout: float = 0.0, drop_path: float = 0.0,
        image_size: int = IMAGE_SIZE,
    ) -> None:  # fmt: skip
        super().__init__(form, embedding_size, width, dropout, drop_path, 0.0, image_size)
        del self.mask_token
        self.heads, side = form.heads, image_size // form.patch
        self.keypoint_linear = nn.Linear(10, form.depth * form.heads * _SIDE**2)
        nn.init.zeros_(self.keypoint_linear.weight)
        nn.init.zeros_(self.keypoint_linear.bias)
        self.landmarks = FindLandmarks(image_size)
        with torch.device("cpu"):
            middle, bucket = (torch.arange(side) + 0.5) / side, buckets(side)
            places = torch.stack([middle.expand(side, side), middle[:, None].expand(side, side)], dim=-1)
        self.register_buffer("bucket", bucket.to(self.pos_embed.device), persistent=False)
        self.register_buffer("places", places.reshape(-1, 1, 2).to(self.pos_embed.device), persistent=False)

    def forward(self, images: Tensor, landmarks: Tensor | None = None) -> Tensor:
        """Return the (b, D) raw embeddings of images (b, 3, S, S), in fp32 even under autocast.

        With landmarks, these take the place of those found where they are not NaN, and the ten numbers found follow each
        embedding: (b, D + 10).
        """
        check_images(images, self.image_size)
        with autocast_off(images.device.type):
            images = images.to(self.pos_embed.dtype)
            found = self.landmarks(images)
            used = found if landmarks is None else torch.where(landmarks.isnan(), found, landmarks)
            x = self.patch_embed(images).transpose(1, 2) + self.pos_embed  # (b, N, C)
            away = F.pad((self.places - used.detach()[:, None]).flatten(2), (0, 1), value=1.0)
            linear = torch.cat([self.keypoint_linear.weight, self.keypoint_linear.bias[:, None]], dim=1)
            tables = linear.view(len(self.blocks), self.heads, _SIDE**2, 11)
        for block, table in zip(self.blocks, tables, strict=True):
            x = block(x, away, table, self.bucket)
        with autocast_off(x.device.type):
            embeddings = self._embeddings(self.norm(x))
            if landmarks is not None:
                return torch.cat([embeddings, found.flatten(1)], dim=1)
            # DDP waits for a gradient of every parameter
            return embeddings + 0.0 * found.sum() if self.training else embeddings
