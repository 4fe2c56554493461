"""IResNet: the residual network of ArcFace, made for faces of 112 x 112 pixels.

Source: Deng et al., "ArcFace", CVPR 2019, https://arxiv.org/abs/1801.07698, Section 3.1: the stem keeps the full
resolution, a block is BN-conv-BN-PReLU-conv-BN, and the output is BN-dropout-FC-BN. Parameter names and initial values
are those of arcface_torch, so that its published weights load with strict=True. With `se` a block ends in a
squeeze-and-excitation, as in the networks SE-LResNetE-IR of the paper's first version.
Shapes: b = images of this rank, H = W = image_size, 112 unless said otherwise, h = w = feature map side, D = embedding size.
"""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from utils.image import IMAGE_SIZE

from .checkpointing import CheckpointedBlock

_STAGE_CHANNELS = (64, 128, 256, 512)
_BLOCK = 1 << 18  # numbers that PReLU's backward pass takes at once, few enough for the cache of a core
STRIDE = 16  # pixels of the image per place of the last feature map, which four stages have halved
_SQUEEZE = 16  # channels of a block per channel of its squeeze, as in Hu et al.


def check_width(width: float) -> None:
    """Raise ValueError unless width is a number above 0 and at most 1000."""
    if not 0 < width <= 1000:  # false of nan
        raise ValueError(f"width must be a number above 0 and at most 1000 (1 = the published network), got {width}")


def scale_channels(channels: int, width: float) -> int:
    """Return channels * width, rounded to the nearest multiple of 8 and at least 16."""
    check_width(width)
    # 16: torch 2.13's fp32 gradient of a strided 1 x 1 convolution over 8 channels crashes on some CPUs
    return max(16, 8 * math.floor(channels * width / 8 + 0.5))


class PReLU(nn.PReLU):
    """PReLU with a slope per channel, faster on the CPU for channels_last images; values and gradients are the same."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, c, h, w) from (b, c, h, w)."""
        b, c, h, w = x.shape
        by_torch = x.device.type != "cpu" or not x.is_contiguous(memory_format=torch.channels_last)
        if by_torch or torch.compiler.is_compiling():  # the compiler fuses it with its neighbours
            return super().forward(x)
        # torch's CPU kernel goes over the channels of one pixel at a time; a row of w * c numbers is one long vector
        pixels = w if c < 128 else 1
        rows = x.permute(0, 2, 3, 1).reshape(-1, pixels * c)
        function = _RowsPReLU.apply if torch.is_grad_enabled() else _rows_prelu
        out: Tensor = function(rows, self.weight)
        return out.view(b, h, w, c).permute(0, 3, 1, 2)


def _rows_prelu(x: Tensor, weight: Tensor) -> Tensor:
    return F.prelu(x, weight.to(x.dtype).repeat(x.shape[1] // len(weight)))


class _RowsPReLU(torch.autograd.Function):
    """PReLU of rows (r, p * c) of p pixels by slopes (c,). torch's own writes a gradient of the slopes as large as x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _rows_prelu(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        slopes = weight.to(x.dtype).repeat(x.shape[1] // len(weight))
        grad_x = torch.empty_like(grad)
        grad_slopes = torch.zeros_like(slopes, dtype=weight.dtype)
        count = max(1, _BLOCK // len(slopes))
        for part, given, kept in zip(x.split(count), grad.split(count), grad_x.split(count), strict=True):
            above = torch.ops.aten.threshold_backward(given, part, 0)  # the gradient where x > 0, else 0
            below = given - above
            torch.addcmul(above, below, slopes, out=kept)
            grad_slopes += below.mul_(part).sum(0, dtype=weight.dtype)
        return grad_x, grad_slopes.view(-1, len(weight)).sum(0)


class BatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d that counts its batches on the host: torch's launches a kernel for that in every layer and step.

    num_batches_tracked is brought up to date where the state dict is made; nothing else reads it, because momentum is fixed.
    """

    recomputing = False  # see backbones/checkpointing.py
    _uncounted = 0  # batches since num_batches_tracked was up to date

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, c, h, w) from (b, c, h, w)."""
        if not self.training or torch.compiler.is_compiling():  # compiled code would be made anew for each number
            return super().forward(x)
        assert self.momentum is not None
        statistics = (self.running_mean, self.running_var, self.weight, self.bias)
        if self.recomputing:  # the first pass moved the statistics and was counted; 0 leaves them as they are
            return F.batch_norm(x, *statistics, True, 0.0, self.eps)
        self._uncounted += 1
        return F.batch_norm(x, *statistics, True, self.momentum, self.eps)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += self._uncounted
        self._uncounted = 0
        super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._uncounted = 0
        super()._load_from_state_dict(*arguments)


def check_head(embedding_size: int, dropout: float) -> None:
    """Raise ValueError for an embedding size or a dropout probability out of range."""
    if not 1 <= embedding_size <= 65536:
        raise ValueError(f"embedding_size must be from 1 to 65536 (512 is usual), got {embedding_size}")
    if not 0.0 <= dropout <= 0.99:
        raise ValueError(f"dropout must be from 0 to 0.99, a probability of dropping, got {dropout}")


def check_image_size(image_size: int) -> int:
    """Return the side of the last feature map for images of that many pixels a side.

    Raises:
        ValueError: it is no multiple of 16 from 48 to 448.
    """
    if not 48 <= image_size <= 448 or image_size % STRIDE:
        raise ValueError(f"image_size must be a multiple of {STRIDE} from 48 to 448 pixels (112 is usual), got {image_size}")
    return image_size // STRIDE


def check_images(images: Tensor, image_size: int) -> None:
    """Raise ValueError unless images are (b, 3, image_size, image_size)."""
    if images.dim() != 4 or tuple(images.shape[1:]) != (3, image_size, image_size):
        raise ValueError(
            f"the backbone takes aligned images of shape (b, 3, {image_size}, {image_size}), got {tuple(images.shape)}: "
            f"align or resize them to {image_size} x {image_size} and put the channels first"
        )


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which autocast is off, because 16-bit embeddings are too inaccurate for the margin."""
    # Entered only if needed, so that exported graphs stay simple and the meta device, which has no autocast, works.
    # The compiler of torch 2.11 cannot follow torch.amp.is_autocast_available.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate in (0, 1) that two linear layers compute from the means of all channels.

    Source: Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, https://arxiv.org/abs/1709.01507, Equations 2 to 4.
    The layers have no biases, and a sixteenth of the channels between them.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // _SQUEEZE, bias=False)
        self.excite = nn.Linear(channels // _SQUEEZE, channels, bias=False)
        for layer in (self.squeeze, self.excite):  # gates near one half, all alike
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, c, h, w) from the same shape."""
        gates = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        return x * gates[:, :, None, None]


class Block(CheckpointedBlock):
    """BN-conv3x3-BN-PReLU-conv3x3-BN with a skip connection: the identity, or a 1 x 1 convolution if the shape changes.

    With `se`, channels are reweighted before the skip connection is added.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, se: bool = False) -> None:
        super().__init__()
        self.bn1 = BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.bn2 = BatchNorm2d(channels)
        self.prelu = PReLU(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn3 = BatchNorm2d(channels)
        self.se = SqueezeExcitation(channels) if se else None
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), BatchNorm2d(channels)
            )

    def compute(self, x: Tensor) -> Tensor:
        """Return (b, channels, h / stride, w / stride) from (b, in_channels, h, w)."""
        out = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        out = self.bn3(self.conv2(out))
        if self.se is not None:
            out = self.se(out)
        return out + (x if self.downsample is None else self.downsample(x))


class IResNet(nn.Module):
    """ArcFace's residual network: r50 to begin with, r100 and r200 for large sets, r18 where time is short.

    Args:
        num_blocks: blocks in each of the four stages.
        width: factor on the channels 64, 128, 256, 512.
        dropout: probability at the flattened feature map, while training.
        se: squeeze-and-excitation in each block.
        image_size: height and width of the images in pixels, a multiple of 16.
        trained_scale: train the scale of the last BatchNorm, for losses that see embeddings before they are normalised.
    """

    papers = ("1801.07698",)

    def __init__(
        self,
        num_blocks: tuple[int, ...],
        embedding_size: int = 512,
        width: float = 1.0,
        dropout: float = 0.0,
        se: bool = False,
        image_size: int = IMAGE_SIZE,
        trained_scale: bool = False,
    ) -> None:
        super().__init__()
        check_head(embedding_size, dropout)
        self.image_size, side = image_size, check_image_size(image_size)
        channels = [scale_channels(c, width) for c in _STAGE_CHANNELS]
        self.conv1 = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.bn1 = BatchNorm2d(channels[0])
        self.prelu = PReLU(channels[0])
        self.layer1 = _stage(channels[0], channels[0], num_blocks[0], se)
        self.layer2 = _stage(channels[0], channels[1], num_blocks[1], se)
        self.layer3 = _stage(channels[1], channels[2], num_blocks[2], se)
        self.layer4 = _stage(channels[2], channels[3], num_blocks[3], se)
        self.bn2 = BatchNorm2d(channels[3])
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels[3] * side**2, embedding_size)
        self.features = nn.BatchNorm1d(embedding_size)
        # A trainable scale per dimension is redundant before the normalisation that follows; the bias is trained.
        self.features.weight.requires_grad = trained_scale
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the (b, D) raw embeddings of images (b, 3, H, W), in fp32 even under autocast."""
        check_images(images, self.image_size)
        x = self.prelu(self.bn1(self.conv1(images)))  # (b, 64, H, W)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (b, 512, H / 16, W / 16)
        x = self.dropout(torch.flatten(self.bn2(x), 1))  # (b, 25088) for images of 112 x 112
        with autocast_off(x.device.type):
            return self.features(self.fc(x.to(self.fc.weight.dtype)))


def _stage(in_channels: int, channels: int, num_blocks: int, se: bool) -> nn.Sequential:
    """Return num_blocks blocks, the first of which halves the resolution."""
    first = Block(in_channels, channels, stride=2, se=se)
    return nn.Sequential(first, *(Block(channels, channels, stride=1, se=se) for _ in range(num_blocks - 1)))
