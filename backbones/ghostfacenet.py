"""GhostFaceNet: small networks that make half of their feature maps from the other half, by cheap depth-wise convolutions.

Sources: Alansari et al., "GhostFaceNets: Lightweight Face Recognition Model From Cheap Operations", IEEE Access 11, 2023,
https://doi.org/10.1109/ACCESS.2023.3266068: GhostNet of 1.3 times the width, with PReLU for ReLU, a stem of stride 1 or 2,
and a global depth-wise convolution for the pooling. The blocks are those of Han et al., "GhostNet", CVPR 2020,
https://arxiv.org/abs/1911.11907, Table 1. Version 2 adds the attention along rows and columns of Tang et al., "GhostNetV2",
NeurIPS 2022, https://arxiv.org/abs/2211.12905, Section 4. The names of the weights are our own: the authors published theirs
for Keras.
Shapes: b = images of this rank, h = w = feature map side, D = embedding size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.image import IMAGE_SIZE

from .checkpointing import CheckpointedBlock
from .iresnet import BatchNorm2d, PReLU, autocast_off, check_head, check_image_size, check_images, check_width

_WIDTH = 1.3  # channels as a multiple of those in _BLOCKS
_STEM = 16
# kernel size, channels inside, channels, squeeze-and-excitation, stride. GhostNet's Table 1
_BLOCKS = (
    (3, 16, 16, False, 1),
    (3, 48, 24, False, 2),
    (3, 72, 24, False, 1),
    (5, 72, 40, True, 2),
    (5, 120, 40, True, 1),
    (3, 240, 80, False, 2),
    (3, 200, 80, False, 1),
    (3, 184, 80, False, 1),
    (3, 184, 80, False, 1),
    (3, 480, 112, True, 1),
    (3, 672, 112, True, 1),
    (5, 672, 160, True, 2),
    (5, 960, 160, False, 1),
    (5, 960, 160, True, 1),
    (5, 960, 160, False, 1),
    (5, 960, 160, True, 1),
)
_LAST = {1: 512, 2: 960}  # channels inside the last block and of the last convolution, by version
_PLAIN = 2  # blocks of version 2 that have no attention, the first ones


def _channels(count: float) -> int:
    """Return a multiple of 4 near the number of channels, not more than a tenth below it; MobileNet's rule."""
    near = max(4, int(count + 2) // 4 * 4)
    return near + 4 if near < 0.9 * count else near


def _conv(inside: int, channels: int, kernel: int | tuple[int, int] = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution without bias that keeps h / stride, and its batch normalisation."""
    padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    conv = nn.Conv2d(inside, channels, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, BatchNorm2d(channels))


class GhostModule(nn.Module):
    """A 1 x 1 convolution makes half of the channels, and a depth-wise 3 x 3 convolution of these the other half."""

    def __init__(self, inside: int, channels: int, activation: bool) -> None:
        super().__init__()
        half = channels // 2  # channels are even
        self.primary, self.cheap = _conv(inside, half), _conv(half, half, 3, groups=half)
        if activation:
            self.primary.append(PReLU(half))
            self.cheap.append(PReLU(half))

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, channels, h, w) from (b, inside, h, w)."""
        first = self.primary(x)
        return torch.cat([first, self.cheap(first)], 1)


class RowAndColumnAttention(nn.Module):
    """Gates in (0, 1) for each place and channel, from its row and column at half the resolution (GhostNetV2's DFC)."""

    def __init__(self, inside: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.AvgPool2d(2),
            _conv(inside, channels),
            _conv(channels, channels, (1, 5), groups=channels),
            _conv(channels, channels, (5, 1), groups=channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, channels, h, w) from (b, inside, h, w)."""
        gates = torch.sigmoid(self.layers(x))
        return F.interpolate(gates, size=x.shape[2:], mode="bilinear", align_corners=False)


class GhostExcitation(nn.Module):
    """Scales each channel by a gate that two linear layers compute from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = _channels(channels / 4)
        self.squeeze, self.prelu, self.excite = nn.Linear(channels, inner), nn.PReLU(inner), nn.Linear(inner, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, c, h, w) from the same shape."""
        gates = F.hardsigmoid(self.excite(self.prelu(self.squeeze(x.mean((2, 3))))))
        return x * gates[:, :, None, None]


class GhostBottleneck(CheckpointedBlock):
    """Two ghost modules, the first of which expands, with a strided depth-wise convolution between them; and a shortcut.

    The shortcut is the identity, or two convolutions where the shape changes in the published network (`reshaped`).
    """

    def __init__(
        self,
        inside: int,
        expansion: int,
        channels: int,
        kernel: int,
        stride: int,
        excitation: bool,
        attention: bool,
        reshaped: bool,
    ) -> None:
        super().__init__()
        self.expand = GhostModule(inside, expansion, activation=True)
        self.attention = RowAndColumnAttention(inside, expansion) if attention else None
        middle: list[nn.Module] = [_conv(expansion, expansion, kernel, stride, groups=expansion)] if stride > 1 else []
        if excitation:
            middle.append(GhostExcitation(expansion))
        self.middle = nn.Sequential(*middle)
        self.project = GhostModule(expansion, channels, activation=False)
        self.shortcut = nn.Sequential()
        if reshaped:
            self.shortcut = nn.Sequential(_conv(inside, inside, kernel, stride, groups=inside), _conv(inside, channels))

    def compute(self, x: Tensor) -> Tensor:
        """Return (b, channels, h / stride, w / stride) from (b, inside, h, w)."""
        out = self.expand(x)
        if self.attention is not None:
            out = out * self.attention(x)
        return self.project(self.middle(out)) + self.shortcut(x)


class GhostFaceNet(nn.Module):
    """Half of the feature maps are cheap filters of the other half: where operations count.

    Args:
        version: 1 = GhostNet's blocks, 2 = with the attention of GhostNetV2.
        stride: of the first convolution.
        width: factor on every channel count of the published network, each then rounded to a multiple of 4.
        dropout: probability at the input of the last linear layer, while training.
        image_size: height and width of the images in pixels, a multiple of 16.
    """

    papers = ("1911.11907", "2211.12905")

    def __init__(
        self,
        version: int,
        stride: int,
        embedding_size: int = 512,
        width: float = 1.0,
        dropout: float = 0.0,
        image_size: int = IMAGE_SIZE,
    ) -> None:
        super().__init__()
        check_head(embedding_size, dropout)
        check_width(width)
        self.image_size, side = image_size, -(-check_image_size(image_size) // stride)  # strided layers round up
        factor = _WIDTH * width
        inside = _channels(_STEM * factor)
        self.stem = _conv(3, inside, 3, stride).append(PReLU(inside))
        blocks: list[nn.Module] = []
        before = _STEM
        for number, (kernel, expansion, channels, excitation, step) in enumerate(_BLOCKS):
            last, reshaped = number == len(_BLOCKS) - 1, step > 1 or channels != before
            before = channels
            expansion, channels = _channels((_LAST[version] if last else expansion) * factor), _channels(channels * factor)
            attention = version == 2 and number >= _PLAIN
            blocks.append(GhostBottleneck(inside, expansion, channels, kernel, step, excitation, attention, reshaped))
            inside = channels
        self.bottlenecks = nn.Sequential(*blocks)
        features = _channels(_LAST[version] * factor)
        self.last = _conv(inside, features).append(PReLU(features))
        self.pool = nn.Sequential(nn.Conv2d(features, features, side, groups=features, bias=False), BatchNorm2d(features))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(features, embedding_size, bias=False)
        self.features = nn.BatchNorm1d(embedding_size)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.weight[:, 0].numel() // module.groups  # He et al.; torch's own forgets the groups
                nn.init.normal_(module.weight, 0.0, (2 / fan_out) ** 0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Return the (b, D) raw embeddings of images (b, 3, H, W), in fp32 even under autocast."""
        check_images(images, self.image_size)
        x = self.last(self.bottlenecks(self.stem(images)))  # (b, 664, 7, 7) for version 1, stride 1 and images of 112 x 112
        with autocast_off(x.device.type):
            x = self.pool(x.to(self.fc.weight.dtype)).flatten(1)
            return self.features(self.fc(self.dropout(x)))
