"""MobileFaceNet: a face network of two million parameters, in the wide variant that arcface_torch calls mbf.

Source: Chen et al., "MobileFaceNets", CCBR 2018, https://arxiv.org/abs/1804.07573, Table 1: bottlenecks of MobileNetV2
with PReLU, and a depth-wise 7 x 7 convolution instead of average pooling. The variant doubles the channels between the
blocks. Parameter names and initial values are those of arcface_torch, so that its published weights load with
strict=True. The attribute `layers` at every level exists only for that.
Shapes: b = images of this rank, h = w = feature map side, D = embedding size.
"""

from torch import Tensor, nn

from .iresnet import BatchNorm2d, PReLU, autocast_off, check_head, check_images, scale_channels


class ConvBlock(nn.Module):
    """A convolution without bias that keeps h / stride, a batch normalisation, and a PReLU unless it is linear."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        kernel_size: int = 1,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        linear: bool = False,
    ) -> None:
        super().__init__()
        conv = nn.Conv2d(in_channels, channels, kernel_size, stride, padding, groups=groups, bias=False)
        activation = [] if linear else [PReLU(channels)]
        self.layers = nn.Sequential(conv, BatchNorm2d(channels), *activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, channels, h', w') from (b, in_channels, h, w)."""
        return self.layers(x)


class Bottleneck(nn.Module):
    """Expand by 1 x 1, filter each channel by 3 x 3, project by 1 x 1 without activation; residual at stride 1."""

    def __init__(self, in_channels: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        self.residual = stride == 1
        self.layers = nn.Sequential(
            ConvBlock(in_channels, expansion),
            ConvBlock(expansion, expansion, kernel_size=3, stride=stride, padding=1, groups=expansion),
            ConvBlock(expansion, channels, linear=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, channels, h / stride, w / stride) from (b, in_channels, h, w)."""
        return x + self.layers(x) if self.residual else self.layers(x)


class Stage(nn.Module):
    """A sequence of residual bottlenecks of one shape."""

    def __init__(self, channels: int, expansion: int, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Bottleneck(channels, channels, expansion, stride=1) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, channels, h, w) from the same shape."""
        return self.layers(x)


class EmbeddingLayers(nn.Module):
    """Global depth-wise convolution, linear layer and batch normalisation: feature map to embedding."""

    def __init__(self, channels: int, embedding_size: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            ConvBlock(channels, channels, kernel_size=7, groups=channels, linear=True),
            nn.Sequential(nn.Flatten(), nn.Dropout(dropout)),  # one entry, so that the next ones keep their indices
            nn.Linear(channels, embedding_size, bias=False),
            nn.BatchNorm1d(embedding_size),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, D) from (b, channels, 7, 7)."""
        return self.layers(x)


class MobileFaceNet(nn.Module):
    """Args:
    width: factor on every channel count.
    dropout: probability at the input of the last linear layer, while training.
    """

    def __init__(self, embedding_size: int = 512, width: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        check_head(embedding_size, dropout)
        c64, c128, c256, c512 = (scale_channels(c, width) for c in (64, 128, 256, 512))
        # Twice c64, not the scaled 128: the second convolution has two channels in each of its c64 groups.
        stem = 2 * c64
        self.layers = nn.ModuleList(
            [
                ConvBlock(3, stem, kernel_size=3, stride=2, padding=1),  # (b, 128, 56, 56)
                ConvBlock(stem, stem, kernel_size=3, padding=1, groups=c64),
                Bottleneck(stem, stem, expansion=c128, stride=2),  # (b, 128, 28, 28)
                Stage(stem, expansion=c128, num_blocks=4),
                Bottleneck(stem, c256, expansion=c256, stride=2),  # (b, 256, 14, 14)
                Stage(c256, expansion=c256, num_blocks=6),
                Bottleneck(c256, c256, expansion=c512, stride=2),  # (b, 256, 7, 7)
                Stage(c256, expansion=c256, num_blocks=2),
            ]
        )
        self.conv_sep = ConvBlock(c256, c512)
        self.features = EmbeddingLayers(c512, embedding_size, dropout)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the (b, D) raw embeddings of images (b, 3, 112, 112), in fp32 even under autocast."""
        check_images(images)
        x = images
        for layer in self.layers:
            x = layer(x)
        # As in arcface_torch, everything after the blocks is in fp32: less than two per cent of the operations.
        with autocast_off(x.device.type):
            return self.features(self.conv_sep(x.to(next(self.conv_sep.parameters()).dtype)))
