"""Vision transformers for faces, as arcface_torch trains them: patches of 9 x 9 pixels, no class token.

Sources: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, https://arxiv.org/abs/2010.11929: a linear map of each
patch plus a position, then blocks of attention and MLP with normalisation first. An et al., "Killing Two Birds with One
Stone", CVPR 2022, https://arxiv.org/abs/2203.15565, train them with Partial FC. The embedding comes from all tokens side by
side. Parameter names and initial values are those of arcface_torch, so that its weights load with strict=True.
Shapes: b = images of this rank, S = image_size, 112 unless said otherwise, N = tokens, 144 of an image of 112 x 112,
n = tokens that are not masked, C = numbers per token, D = embedding size.
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.image import IMAGE_SIZE

from .checkpointing import CheckpointedBlock
from .iresnet import autocast_off, check_head, check_image_size, check_images, scale_channels


class Form(NamedTuple):
    """What a vision transformer is made of."""

    dim: int  # numbers per token
    depth: int  # blocks
    heads: int = 8  # of the attention
    times: int = 4  # how much wider the MLP is inside
    patch: int = 9  # side of a patch in pixels; of 112 rows and columns the last four belong to no patch of 9


def check_shares(drop_path: float, mask_ratio: float) -> None:
    """Raise ValueError for a drop path probability or a share of masked tokens out of range."""
    for name, value, meaning in (
        ("drop_path", drop_path, "the probability of the last block"),
        ("mask_ratio", mask_ratio, "a share of the tokens"),
    ):
        if not 0.0 <= value <= 0.99:
            raise ValueError(f"{name} must be from 0 to 0.99, {meaning}, got {value}")


def draw_kept(count: int, num_kept: int, num_tokens: int, device: torch.device) -> Tensor:
    """Return the tokens (count, num_kept) int64 that are not masked, drawn for each image without replacement."""
    return torch.rand(count, num_tokens, device=device).argsort(dim=1)[:, :num_kept]


class Attention(nn.Module):
    """Self-attention of several heads. Its kernels compute softmax and sums in fp32, also of 16-bit inputs."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return (b, n, C) from (b, n, C); bias (b, heads, n, n) is added to the logits."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # (b, heads, n, C / heads)
        found = F.scaled_dot_product_attention(q, k, v, bias)
        # torch.onnx keeps a view that only the strides of this machine's kernel with a bias allow
        return self.proj(found.transpose(1, 2).flatten(2) if bias is None else torch.cat(found.unbind(1), dim=-1))


class DropPath(nn.Module):
    """Stochastic depth: while training, leaves out a residual branch for some images, and scales that of the others up.

    Source: Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, https://arxiv.org/abs/1603.09382.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, branch: Tensor) -> Tensor:
        """Return (b, n, C) from (b, n, C), in fp32 at least: 1 / (1 - probability) in 16 bits would be a biased factor."""
        if not self.training or self.probability == 0:
            return branch
        kept = 1.0 - self.probability
        dtype = torch.promote_types(branch.dtype, torch.float32)
        factors = torch.empty(len(branch), 1, 1, dtype=dtype, device=branch.device).bernoulli_(kept)
        return branch * (factors / kept)


class TransformerBlock(CheckpointedBlock):
    """Attention and MLP, each behind a normalisation and beside a skip connection that stays in fp32 under autocast."""

    def __init__(self, dim: int, heads: int, times: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)  # here, because the order of the parameters numbers the states of optimizers
        self.attn = Attention(dim, heads)
        self.drop_path = DropPath(drop_path)
        layers = OrderedDict(fc1=nn.Linear(dim, times * dim), relu=nn.ReLU6(), fc2=nn.Linear(times * dim, dim))
        self.mlp = nn.Sequential(layers)

    def compute(self, x: Tensor, *bias: Tensor) -> Tensor:
        """Return (b, n, C) from (b, n, C); bias as in `Attention`."""
        x = x + self.drop_path(self.attn(self.norm1(x), *bias))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Attention between patches of 9 x 9 pixels: for large sets, with AdamW.

    Args:
        form: dim, depth, heads, times and patch.
        width: factor on dim.
        dropout: probability before the last linear layer, while training.
        drop_path: probability of leaving out a residual branch of the last block, while training; it grows linearly from 0.
        mask_ratio: share of the tokens that the blocks do not see, while training; one trained token stands for them after the
            blocks, as in He et al., "Masked Autoencoders", CVPR 2022, https://arxiv.org/abs/2111.06377.
        image_size: height and width of the images in pixels, a multiple of 16.
    """

    papers: tuple[str, ...] = ("2010.11929", "2203.15565")
    block = TransformerBlock

    def __init__(
        self,
        form: Form,
        embedding_size: int = 512,
        width: float = 1.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        mask_ratio: float = 0.0,
        image_size: int = IMAGE_SIZE,
    ) -> None:
        super().__init__()
        check_head(embedding_size, dropout)
        check_shares(drop_path, mask_ratio)
        check_image_size(image_size)
        dim = scale_channels(form.dim, width)
        dim += -dim % form.heads  # a multiple of the heads
        self.image_size, self.num_tokens = image_size, (image_size // form.patch) ** 2
        self.num_kept = max(1, int(self.num_tokens * (1.0 - mask_ratio)))
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_tokens, dim))
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Conv2d(3, dim, form.patch, stride=form.patch), flat=nn.Flatten(2)))
        drops = [drop_path * number / (form.depth - 1) for number in range(form.depth)]
        self.blocks = nn.ModuleList(self.block(dim, form.heads, form.times, drop) for drop in drops)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.feature = nn.Sequential(
            nn.Linear(dim * self.num_tokens, dim, bias=False),
            nn.BatchNorm1d(dim, eps=2e-5),
            nn.Linear(dim, embedding_size, bias=False),
            nn.BatchNorm1d(embedding_size, eps=2e-5),
        )
        for weight in (self.pos_embed, self.mask_token):
            nn.init.trunc_normal_(weight, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the (b, D) raw embeddings of images (b, 3, S, S), in fp32 even under autocast."""
        check_images(images, self.image_size)
        masked = self.training and self.num_kept < self.num_tokens
        positions: Tensor = self.pos_embed
        if self.training and not masked:  # DDP waits for a gradient of every parameter
            positions = positions + 0.0 * self.mask_token
        with autocast_off(images.device.type):
            x = self.patch_embed(images.to(positions.dtype)).transpose(1, 2) + positions  # (b, N, C)
        if masked:
            kept = draw_kept(len(x), self.num_kept, self.num_tokens, x.device).unsqueeze(-1).expand(-1, -1, x.shape[2])
            x = x.gather(1, kept)  # (b, n, C)
        for block in self.blocks:
            x = block(x)
        with autocast_off(x.device.type):
            x = self.norm(x)
            if masked:
                x = self.mask_token.expand(len(x), self.num_tokens, -1).scatter(1, kept, x)  # (b, N, C)
            return self._embeddings(x)

    def _embeddings(self, x: Tensor) -> Tensor:
        """Return (b, D) from (b, N, C)."""
        x = self.feature[1](self.feature[0](x.flatten(1)))
        return self.feature[3](self.feature[2](self.dropout(x)))
