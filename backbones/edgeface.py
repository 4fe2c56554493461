"""EdgeFace: EdgeNeXt, a small network of convolutions and of attention over channels, with linear layers of low rank.

Sources: George et al., "EdgeFace: Efficient Face Recognition Model for Edge Devices", 2023, https://arxiv.org/abs/2307.01838,
Section III: two linear layers with max(2, floor(gamma min(m, n))) numbers between them for each one of m inputs and n
outputs. Maaz et al., "EdgeNeXt", 2022, https://arxiv.org/abs/2206.10589, Section 3 and Table 1. Its attention is that of Ali
et al., "XCiT", 2021, https://arxiv.org/abs/2106.09681, Equation 2. The names of parameters are those of the published files
of EdgeFace.
Shapes: b = images of this rank, c = channels, h = w = feature map side, n = h w, D = embedding size.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.image import IMAGE_SIZE

from .checkpointing import CheckpointedBlock
from .iresnet import autocast_off, check_head, check_image_size, check_images, scale_channels

_DEPTHS = (3, 3, 9, 3)  # blocks of the stages; the last one of each but the first stage is one of attention
_KERNELS = (3, 5, 7, 9)  # sides of the depth-wise convolutions of the stages
_SPLITS = (1, 2, 3, 4)  # parts into which a block of attention splits its channels, by stage
_WITH_PLACES = 1  # the stage whose block of attention knows rows and columns
_EXPANSION, _LAYER_SCALE, _EPS = 4, 1e-6, 1e-6
_WAVES, _LONGEST = 32, 10_000.0  # sines and cosines of a row or column, and the ratio of their longest to shortest wave


def _low_rank(inputs: int, outputs: int, gamma: float) -> nn.Sequential:
    """Return a linear layer whose matrix is the product of two, of rank max(2, floor(gamma min(inputs, outputs)))."""
    rank = max(2, int(min(inputs, outputs) * gamma))
    return nn.Sequential(OrderedDict(linear1=nn.Linear(inputs, rank, bias=False), linear2=nn.Linear(rank, outputs)))


def _channel_mlp(channels: int, gamma: float) -> nn.Sequential:
    """Return two linear layers with GELU between them, for the channels (..., c) of each place alone."""
    inside = _EXPANSION * channels
    fc1, fc2 = _low_rank(channels, inside, gamma), _low_rank(inside, channels, gamma)
    return nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU(), fc2=fc2))


class LayerNorm2d(nn.LayerNorm):
    """Layer normalisation over the channels of each place."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, c, h, w) from the same shape."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvEncoder(CheckpointedBlock):
    """A depth-wise convolution, then linear layers for each place, with a skip connection."""

    def __init__(self, channels: int, kernel: int, gamma: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), _LAYER_SCALE))
        self.conv_dw = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=_EPS)
        self.mlp = _channel_mlp(channels, gamma)

    def compute(self, x: Tensor) -> Tensor:
        """Return (b, c, h, w) from the same shape."""
        out = self.gamma * self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        return x + out.permute(0, 3, 1, 2)


class ChannelAttention(nn.Module):
    """Attention between the channels of each head instead of between places: its matrix does not grow with the image."""

    def __init__(self, channels: int, heads: int, gamma: float) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv, self.proj = _low_rank(channels, 3 * channels, gamma), _low_rank(channels, channels, gamma)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, n, c) from the same shape."""
        b, n, c = x.shape
        query, key, value = self.qkv(x).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 4, 1)  # (b, heads, d, n)
        weights = (F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-2, -1)) * self.temperature
        out = weights.softmax(dim=-1) @ value
        return self.proj(out.permute(0, 3, 1, 2).reshape(b, n, c))


class Places(nn.Module):
    """A trained projection of sines and cosines of the row and the column."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.token_projection = nn.Conv2d(2 * _WAVES, channels, 1)

    def forward(self, side: int) -> Tensor:
        """Return (1, c, side, side)."""
        weight = self.token_projection.weight
        at = 2 * math.pi * torch.arange(1, side + 1, device=weight.device) / (side + 1e-6)
        rates = _LONGEST ** (-2 * torch.arange(_WAVES // 2, device=weight.device) / _WAVES)
        angles = at[:, None] * rates
        waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1).t()  # (waves, side)
        rows, columns = waves[:, :, None].expand(-1, side, side), waves[:, None, :].expand(-1, side, side)
        return self.token_projection(torch.cat([rows, columns])[None].to(weight.dtype))


class AttentionEncoder(CheckpointedBlock):
    """EdgeNeXt's SDTA: depth-wise convolutions of growing reach over parts of the channels, then attention over channels."""

    def __init__(self, channels: int, splits: int, heads: int, with_places: bool, gamma: float) -> None:
        super().__init__()
        self.gamma_xca, self.gamma = (nn.Parameter(torch.full((channels,), _LAYER_SCALE)) for _ in range(2))
        part = -(-channels // splits)
        self.convs = nn.ModuleList(nn.Conv2d(part, part, 3, padding=1, groups=part) for _ in range(splits - 1))
        self.pos_embd = Places(channels) if with_places else None
        self.norm_xca = nn.LayerNorm(channels, eps=_EPS)
        self.xca = ChannelAttention(channels, heads, gamma)
        self.norm = nn.LayerNorm(channels, eps=_EPS)
        self.mlp = _channel_mlp(channels, gamma)

    def compute(self, x: Tensor) -> Tensor:
        """Return (b, c, h, w) from the same shape."""
        b, c, h, w = x.shape
        parts = list(x.chunk(len(self.convs) + 1, 1))
        for number, conv in enumerate(self.convs):
            parts[number] = conv(parts[number] + parts[number - 1] if number else parts[number])
        mixed = torch.cat(parts, 1)
        if self.pos_embd is not None:
            mixed = mixed + self.pos_embd(h)
        tokens = mixed.flatten(2).transpose(1, 2)  # (b, n, c)
        tokens = tokens + self.gamma_xca * self.xca(self.norm_xca(tokens))
        out = self.gamma * self.mlp(self.norm(tokens)).view(b, h, w, c)
        return x + out.permute(0, 3, 1, 2)


def _stage(number: int, before: int, channels: int, heads: int, gamma: float) -> nn.Sequential:
    """Return blocks of one size, after a convolution that halves the resolution in all stages but the first."""
    downsample = nn.Sequential()
    attention: list[nn.Module] = []
    if number:
        downsample = nn.Sequential(LayerNorm2d(before, eps=_EPS), nn.Conv2d(before, channels, 2, stride=2))
        attention = [AttentionEncoder(channels, _SPLITS[number], heads, number == _WITH_PLACES, gamma)]
    count = _DEPTHS[number] - len(attention)
    blocks = nn.Sequential(*(ConvEncoder(channels, _KERNELS[number], gamma) for _ in range(count)), *attention)
    return nn.Sequential(OrderedDict(downsample=downsample, blocks=blocks))


class EdgeNeXt(nn.Module):
    """A stem that takes patches of 4 x 4 pixels, four stages, and a linear layer of the mean over all places."""

    def __init__(self, channels: Sequence[int], heads: int, embedding_size: int, dropout: float, gamma: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels[0], 4, stride=4), LayerNorm2d(channels[0], eps=_EPS))
        before = [channels[0], *channels]
        self.stages = nn.Sequential(*(_stage(k, before[k], count, heads, gamma) for k, count in enumerate(channels)))
        norm, fc = nn.LayerNorm(channels[-1], eps=_EPS), _low_rank(channels[-1], embedding_size, gamma)
        self.head = nn.Sequential(OrderedDict(norm=norm, dropout=nn.Dropout(dropout), fc=fc))

    def forward(self, images: Tensor) -> Tensor:
        """Return (b, D) from (b, 3, H, W)."""
        x = self.stages(self.stem(images))  # (b, 192, 3, 3) for edgeface_xs and images of 112 x 112
        with autocast_off(x.device.type):
            return self.head(x.to(self.head[0].weight.dtype).mean((2, 3)))


class EdgeFace(nn.Module):
    """Convolutions, attention over channels and layers of low rank: where parameters and operations count.

    Args:
        channels: of the four stages.
        heads: of each attention.
        width: factor on the channels of all stages.
        dropout: probability at the input of the last linear layer, while training.
        gamma: rank of the linear layers, as a share of the full rank.
        image_size: height and width of the images in pixels, a multiple of 16.
    """

    papers = ("2307.01838", "2206.10589")

    def __init__(
        self,
        channels: Sequence[int],
        heads: int,
        embedding_size: int = 512,
        width: float = 1.0,
        dropout: float = 0.0,
        gamma: float = 0.5,
        image_size: int = IMAGE_SIZE,
    ) -> None:
        super().__init__()
        check_head(embedding_size, dropout)
        check_image_size(image_size)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma must be above 0 and at most 1, a share of the full rank, got {gamma}")
        self.image_size = image_size
        scaled = [scale_channels(count, width) for count in channels]  # multiples of 8, which the number of heads divides
        counts = list(channels) if width == 1 else scaled
        self.model = EdgeNeXt(counts, heads, embedding_size, dropout, gamma)  # `model` is in the names of the published files
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the (b, D) raw embeddings of images (b, 3, H, W), in fp32 even under autocast."""
        check_images(images, self.image_size)
        return self.model(images)
