"""MobileFaceNet: a face network of two million parameters, in the wide variants that arcface_torch calls mbf and mbf_large.

Source: Chen et al., "MobileFaceNets", CCBR 2018, https://arxiv.org/abs/1804.07573, Table 1: bottlenecks of MobileNetV2
with PReLU, and a depth-wise 7 x 7 convolution instead of average pooling. mbf doubles the channels between the blocks;
mbf_large doubles them again, and the number of blocks. Parameter names and initial values are those of arcface_torch, so
that its published weights load with strict=True. The attribute `layers` at every level exists only for that.
Shapes: b = images of this rank, h = w = feature map side, D = embedding size.
"""

from torch import Tensor, nn

from utils.image import IMAGE_SIZE

from .checkpointing import CheckpointedBlock
from .iresnet import BatchNorm2d, PReLU, autocast_off, check_head, check_image_size, check_images, scale_channels


class Layers(nn.Module):
    """Layers in a row, under the names of arcface_torch."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last layer makes of x (b, c, h, w)."""
        return self.layers(x)


def _conv(
    inputs: int, channels: int, kernel_size: int = 1, stride: int = 1, padding: int = 0, groups: int = 1, linear: bool = False
) -> Layers:
    """Return a convolution without bias that keeps h / stride, a batch normalisation, and a PReLU unless it is linear."""
    conv = nn.Conv2d(inputs, channels, kernel_size, stride, padding, groups=groups, bias=False)
    return Layers(conv, BatchNorm2d(channels), *([] if linear else [PReLU(channels)]))


class Bottleneck(CheckpointedBlock):
    """Expand by 1 x 1, filter each channel by 3 x 3, project by 1 x 1 without activation; residual at stride 1."""

    def __init__(self, in_channels: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        self.residual = stride == 1
        self.layers = nn.Sequential(
            _conv(in_channels, expansion),
            _conv(expansion, expansion, kernel_size=3, stride=stride, padding=1, groups=expansion),
            _conv(expansion, channels, linear=True),
        )

    def compute(self, x: Tensor) -> Tensor:
        """Return (b, channels, h / stride, w / stride) from (b, in_channels, h, w)."""
        return x + self.layers(x) if self.residual else self.layers(x)


def _stage(channels: int, expansion: int, num_blocks: int) -> Layers:
    """Return a sequence of residual bottlenecks of one shape."""
    return Layers(*(Bottleneck(channels, channels, expansion, stride=1) for _ in range(num_blocks)))


class MobileFaceNet(nn.Module):
    """Bottlenecks of MobileNetV2 without pooling: for phones and CPUs, and to try things.

    Args:
        num_blocks: residual bottlenecks before each of the three that halve the resolution, and after the last. A first
            number of 1 stands for a depth-wise convolution, as in Table 1.
        scale: channels between the blocks, as a multiple of those in Table 1.
        width: factor on every channel count.
        dropout: probability at the input of the last linear layer, while training.
        image_size: height and width of the images in pixels, a multiple of 16.
    """

    papers = ("1804.07573",)

    def __init__(
        self,
        num_blocks: tuple[int, ...],
        scale: int,
        embedding_size: int = 512,
        width: float = 1.0,
        dropout: float = 0.0,
        image_size: int = IMAGE_SIZE,
    ) -> None:
        super().__init__()
        check_head(embedding_size, dropout)
        self.image_size, side = image_size, check_image_size(image_size)
        c64, c128, c256, c512 = (scale_channels(c, width) for c in (64, 128, 256, 512))
        # A multiple of c64, not the scaled number: the second convolution of mbf has whole channels in each of its c64 groups.
        stem, wide = scale * c64, scale_channels(128 * scale, width)
        if num_blocks[0] == 1:
            second: nn.Module = _conv(stem, stem, kernel_size=3, padding=1, groups=c64)
        else:
            second = _stage(stem, expansion=c128, num_blocks=num_blocks[0])
        self.layers = nn.ModuleList(
            [
                _conv(3, stem, kernel_size=3, stride=2, padding=1),  # (b, 64 scale, 56, 56) for images of 112 x 112
                second,
                Bottleneck(stem, stem, expansion=c128, stride=2),  # (b, 64 scale, 28, 28)
                _stage(stem, expansion=c128, num_blocks=num_blocks[1]),
                Bottleneck(stem, wide, expansion=c256, stride=2),  # (b, 128 scale, 14, 14)
                _stage(wide, expansion=c256, num_blocks=num_blocks[2]),
                Bottleneck(wide, wide, expansion=c512, stride=2),  # (b, 128 scale, 7, 7)
                _stage(wide, expansion=c256, num_blocks=num_blocks[3]),
            ]
        )
        self.conv_sep = _conv(wide, c512)
        self.features = Layers(  # a global depth-wise convolution makes (b, 512, 1, 1)
            _conv(c512, c512, kernel_size=side, groups=c512, linear=True),
            nn.Sequential(nn.Flatten(), nn.Dropout(dropout)),  # one entry, so that the next ones keep their indices
            nn.Linear(c512, embedding_size, bias=False),
            nn.BatchNorm1d(embedding_size),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the (b, D) raw embeddings of images (b, 3, H, W), in fp32 even under autocast."""
        check_images(images, self.image_size)
        x = images
        for layer in self.layers:
            x = layer(x)
        # As in arcface_torch, everything after the blocks is in fp32: less than two per cent of the operations.
        with autocast_off(x.device.type):
            return self.features(self.conv_sep(x.to(next(self.conv_sep.parameters()).dtype)))
