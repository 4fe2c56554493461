"""Teachers: networks that do not train, whose answers to the images are targets beside the labels (knowledge distillation).

The losses, each a mean over a micro-batch of all ranks, with embeddings e of the student and f of the teacher:

    embedding: cosine, 1 - cos(e_i, f_i); or mse, the mean over the D numbers of (e_i - f_i)^2 (the hint of FitNets, 2015)
    relations: the mean over all pairs of images i, j of (cos(e_i, e_j) - cos(f_i, f_j))^2 (Tung and Mori, ICCV 2019, eq. 4,
        with cosines; a relational distillation as of Park et al., CVPR 2019)

Shapes: b = images of this rank in one micro-batch, D = embedding size, which only the embedding loss needs equal.
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from easydict import EasyDict
from torch import Tensor, nn
from torch.nn import functional

from backbones import build_backbone
from data.augment import prepare
from eval.foreign_networks import ForeignNetwork
from eval.networks import Network, OtherInput, add_choice_of_network, load_network
from partial_fc.collectives import Collectives
from utils.cli import Parser
from utils.distributed.agreement import digest_tensors
from utils.memory import BackboneMemory
from utils.text import prefix_errors

AVERAGE = "average"  # of teacher.path: the moving average of the run's own weights
PREFIX = "teacher_"  # of the names of the losses


class Teacher(NamedTuple):
    """A teacher and what the student learns from it.

    Args:
        network: from (b, 3, S, S) images to embeddings, in evaluation mode; an empty module until the run has its average.
        image_size: S, in pixels.
        embedding_size: numbers per face.
        identity: hash of its weights and of its input, or AVERAGE.
        image_bytes: the most memory of a forward pass, per image.
        losses: weight of each loss that is used, by its name.
        mse: whether the embedding loss is mse, not cosine.
        title: for the log.
    """

    network: nn.Module
    image_size: int
    embedding_size: int
    identity: str
    image_bytes: int
    losses: dict[str, float]
    mse: bool
    title: str

    def on(self, device: torch.device, average: nn.Module | None) -> "Teacher":
        """Return the teacher on the device of the run, or the average of its weights if that is the teacher."""
        if self.identity == AVERAGE:
            assert average is not None, "a rule asks for train.ema"
            return self._replace(network=average)
        return self._replace(network=self.network.to(device, memory_format=torch.channels_last))  # type: ignore[call-overload]

    def beside(self, memory: BackboneMemory, device: torch.device) -> BackboneMemory:
        """Return the memory of the backbone and of the teacher, whose forward pass is over before that of the backbone."""
        loaded = device.type == "cpu"  # what is free was measured after it
        own = 0 if loaded else sum(tensor.nbytes for tensor in self.network.state_dict().values())
        return BackboneMemory(memory.parameters + own, max(memory.per_image, self.image_bytes))

    def describe(self) -> str:
        """Return one line for the log."""
        kinds = {f"{PREFIX}embedding": "mse of the embeddings" if self.mse else "cosine of the embeddings"}
        losses = (f"{weight:g} x {kinds.get(name, name.removeprefix(PREFIX))}" for name, weight in self.losses.items())
        return f"{self.title}, {self.embedding_size} numbers per face; the loss has {', '.join(losses)}"

    @torch.no_grad()
    def embed(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return (b, D) float embeddings of the images (., H, W, 3) uint8 and mirrored (.,) bool of all parts together."""
        images = torch.cat([prepare(*part) for part in parts])
        if images.shape[-1] != self.image_size:
            images = functional.interpolate(images, [self.image_size] * 2, mode="bilinear", antialias=True)
        embeddings: Tensor = self.network(images)
        return embeddings.float()

    def compare(self, student: Tensor, teacher: Tensor, collectives: Collectives) -> dict[str, tuple[Tensor, float]]:
        """Return value and weight of each loss by its name. A collective call.

        The values are those of all ranks; their gradients are this rank's part of the gradient of the global mean.

        Args:
            student: (b, D) float embeddings of this rank, b the same on all ranks.
            teacher: (b, D) float.
        """
        found = {}
        for name, weight in self.losses.items():
            if name == f"{PREFIX}relations":
                value = relation_loss(student, teacher, collectives)
            else:
                value = embedding_loss(student, teacher, self.mse, collectives)
            found[name] = (value, weight)
        return found


class _SumOverRanks(torch.autograd.Function):
    """The sum of a number over the ranks, whose gradient with respect to this rank's number is a given factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float, collectives: Collectives) -> Tensor:
        ctx.factor = factor
        return collectives.sum(value.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.factor, None, None


def embedding_loss(student: Tensor, teacher: Tensor, mse: bool, collectives: Collectives) -> Tensor:
    """Return the loss () between embeddings (b, D) of the same images; see `Teacher.compare`."""
    each = (student - teacher).square().mean(dim=1) if mse else 1 - (_normalise(student) * _normalise(teacher)).sum(dim=1)
    value: Tensor = _SumOverRanks.apply(each.sum() / (len(student) * collectives.world_size), 1.0, collectives)
    return value


def relation_loss(student: Tensor, teacher: Tensor, collectives: Collectives) -> Tensor:
    """Return the mean squared difference () between the cosines of all pairs of images; see `Teacher.compare`."""
    own, taught = _normalise(student), _normalise(teacher)
    differences = own @ collectives.all_gather(own.detach()).t() - taught @ collectives.all_gather(taught).t()
    total = differences.square().sum() / (len(own) * collectives.world_size) ** 2
    # each pair stands twice in the matrix, and autograd sees the image that is in this rank's rows, not in the columns
    value: Tensor = _SumOverRanks.apply(total, 2.0, collectives)
    return value


def _normalise(embeddings: Tensor) -> Tensor:
    return functional.normalize(embeddings, dim=1, eps=1e-12)


class _Options(Parser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; teacher.options are those that name a network to face eval")


def open_teacher(config: EasyDict) -> Teacher | None:
    """Return the teacher of a configuration, on the CPU; None if there is none.

    Raises:
        ValueError: it cannot be read, or its embeddings do not suit the losses.
    """
    section, size, dim = config.teacher, config.data.image_size, config.backbone.embedding_size
    losses = {f"{PREFIX}{name}": section[name] for name in ("embedding", "relations") if section[name]}
    mse = section.embedding_loss == "mse"
    if section.path == AVERAGE:
        return Teacher(nn.Module(), size, dim, AVERAGE, 0, losses, mse, "the moving average of the weights")
    if not section.path:
        return None
    with prefix_errors("teacher.path"):
        network = _read(section.path, section.options, config.run.threads)
        model = network.model.requires_grad_(False).eval()
        with torch.no_grad(), largest_output(model) as largest:
            given = model(torch.zeros(1, 3, network.image_size, network.image_size)).shape[1]
    if given != dim and section.embedding:
        raise ValueError(
            f"teacher.embedding needs embeddings of backbone.embedding_size={dim} numbers, "
            f"those of {section.path} have {given}; set it to 0 and teacher.relations instead, which compares any sizes"
        )
    # the input and output of a layer, and what goes around it
    return Teacher(model, network.image_size, given, _identity(model), 3 * largest[0], losses, mse, network.title)


def _read(path: str, options: str, threads: int) -> Network:
    parser = _Options(add_help=False)
    add_choice_of_network(parser)
    given = parser.parse_args([*shlex.split(options), "--", path])
    given.threads = threads or torch.get_num_threads()
    return load_network(given, build_backbone)


def _identity(model: nn.Module) -> str:
    """Return what tells one teacher from another."""
    other = ""
    if isinstance(model, OtherInput):
        other, model = f" bgr={model.bgr} mean={model.mean} std={model.std}", model.model
    return (model.hash if isinstance(model, ForeignNetwork) else digest_tensors(model.state_dict())) + other


@contextmanager
def largest_output(network: nn.Module) -> Iterator[list[int]]:
    """Note, in the list, the bytes of the largest tensor that a module of the network returns."""
    largest = [0]

    def note(module: nn.Module, given: Any, output: Any) -> None:
        largest[0] = max(largest[0], output.nbytes if isinstance(output, Tensor) else 0)

    hooks = [module.register_forward_hook(note) for module in network.modules()]
    yield largest
    for hook in hooks:
        hook.remove()
