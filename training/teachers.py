"""Teachers: networks that do not train, whose answers to the images are targets beside the labels (knowledge distillation).

The losses, each a mean over a micro-batch of all ranks, with embeddings e of the student and f of the teacher:

    embedding: cosine, 1 - cos(e_i, f_i); or mse, the mean over the D numbers of (e_i - f_i)^2 (the hint of FitNets, 2015)
    relations: the mean over all pairs of images i, j of (cos(e_i, e_j) - cos(f_i, f_j))^2 (Tung and Mori, ICCV 2019, eq. 4,
        with cosines; a relational distillation as of Park et al., CVPR 2019)
    logits: see `SoftTargets`

Shapes: b = images of this rank in one micro-batch, B = of all ranks, n = classes of this rank, D = embedding size. Where the
teacher's is another one, E, the embedding loss compares W e with f: see `Projection`.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from easydict import EasyDict
from torch import Tensor, nn
from torch.nn import functional

from backbones import build_backbone
from data.augment import prepare
from data.base import FaceDataset
from data.scan import indices_of
from eval.embedding_table import read_table
from eval.networks import Network, add_choice_of_network, load_network
from partial_fc import HeadConfig, PartialFC
from partial_fc.collectives import Collectives
from partial_fc.init import CentreSource, open_centres
from partial_fc.kernels.plain import auto_chunk
from partial_fc.softmax.loss import ReadyGradient
from utils.checkpoint.trainer import tensor_fault
from utils.cli import Parser
from utils.distributed.agreement import digest_tensors
from utils.memory import BackboneMemory
from utils.text import prefix_errors

_TILES = 6  # matrices of logits, and what they are made of, that exist at once
_BLOCK = 65536  # centres read at once


def bytes_of(classes: int, rows: int, source: CentreSource, student: int, chunk: int) -> int:
    """Return the bytes for a rank's classes, B = rows images and chunks of so many classes; `student` is the student's D."""
    chunk = min(chunk, classes)
    return 4 * (classes * source.embedding_size + chunk * (_TILES * rows + 2 * student) + 4 * rows * student)


class SoftTargets:
    """The teacher's class centres, of `source`, beside those of the run's head, whose classes are the same; n of each here.

    Logits are z_k = s cos(e, w_k) / T over all classes k, without a margin: of the student with the run's centres, of the
    teacher with those that it was trained with. The loss is T^2 sum_k p_k (log p_k - log q_k), p and q the softmax of teacher
    and student (Hinton, Vinyals and Dean, 2015), a mean over the images. Its gradient reaches the backbone, not the centres.
    """

    def __init__(self, head: PartialFC, source: CentreSource, temperature: float) -> None:
        self._head, self._temperature = head, temperature  # T
        labels = head.shard_classes()
        self._centres = torch.empty(len(labels), source.embedding_size, device=head.positive_cosine.device)
        for start in range(0, len(labels), _BLOCK):
            rows = slice(start, start + _BLOCK)
            self._centres[rows] = functional.normalize(source.read(labels[rows]), dim=1, eps=1e-12)

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss () of embeddings (b, D) of the same images. A collective call."""
        taught = functional.normalize(teacher, dim=1, eps=1e-12)
        unit = functional.normalize(student, dim=1, eps=1e-12)
        return ReadyGradient.apply(unit, lambda rows: self._compute(rows, taught))

    def _compute(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and its gradient (b, D) with respect to unit embeddings."""
        ranks = self._head.collectives
        self._head.catch_up("soft targets")
        rows, taught = ranks.all_gather(student), ranks.all_gather(teacher)
        factor = self._head.margin.scale / self._temperature
        own, others = self._log_sum(rows, self._own), self._log_sum(taught, self._taught)
        value, gradient = rows.new_zeros(len(rows)), torch.zeros_like(rows)
        for here in self._chunks():
            centres = self._own(here)
            log_q = (rows @ centres.t()).mul_(factor).sub_(own[:, None])
            log_p = (taught @ self._taught(here).t()).mul_(factor).sub_(others[:, None])
            p = log_p.exp()
            value += (p * log_p.sub_(log_q)).sum(dim=1)
            gradient += log_q.exp_().sub_(p) @ centres
        share = self._temperature**2 / len(rows)
        return ranks.sum(value.sum() * share), ranks.reduce_scatter(gradient.mul_(share * factor))

    def _log_sum(self, rows: Tensor, centres: Callable[[slice], Tensor]) -> Tensor:
        """Return the logarithm (B,) of the sum of the exponentials over all classes in one pass (Milakov, Gimelshein)."""
        ranks, factor = self._head.collectives, self._head.margin.scale / self._temperature
        top, total = rows.new_full((len(rows),), -torch.inf), rows.new_zeros(len(rows))
        for here in self._chunks():
            logits = (rows @ centres(here).t()).mul_(factor)
            higher = torch.maximum(top, logits.amax(dim=1))
            total = total * (top - higher).exp() + logits.sub_(higher[:, None]).exp_().sum(dim=1)
            top = higher
        highest = ranks.max(top.clone())
        return highest + ranks.sum(total * (top - highest).exp()).log()

    def _chunks(self) -> Iterator[slice]:
        step = self._head.chunk
        return (slice(start, min(start + step, len(self._centres))) for start in range(0, len(self._centres), step))

    def _own(self, here: slice) -> Tensor:
        return functional.normalize(self._head.centre_store.load("centres", here), dim=1, eps=1e-12)

    def _taught(self, here: slice) -> Tensor:
        return self._centres[here]


AVERAGE = "average"  # of teacher.path: the moving average of the run's own weights
PREFIX = "teacher_"  # of the names of the losses
PROJECTION = f"{PREFIX}projection.safetensors"  # in a checkpoint
_DECAY = 0.99  # of what a projection has seen, for each micro-batch
_RIDGE = 1e-3  # of the mean of its diagonal
_SAMPLED = 4096  # vectors of a table that tell it from others, with the norms of all


class Projection:
    """The linear map W (D, E) from the student's embeddings e to a teacher's f of another size, fitted while both are seen.

    W has the least sum of squares of f - W e (ridge regression) over the images of all ranks, in which a micro-batch counts
    less with each one that follows. With W at its best the gradient with respect to e is that of the least error over all W
    (variable projection, Golub and Pereyra, SIAM J. Numer. Anal. 1973), so W needs no optimizer.
    """

    def __init__(self, dim: int, other: int, device: torch.device | None = None) -> None:
        self.moments = torch.zeros(dim, dim + other, device=device)  # float32, the sums of e e^T and e f^T

    def __call__(self, student: Tensor, teacher: Tensor, collectives: Collectives) -> Tensor:
        """Take embeddings (b, D) and (b, E) in; return W e, (b, E). A collective call."""
        with torch.no_grad():
            seen = collectives.sum(student.t() @ torch.cat([student, teacher], dim=1))
            moments = _DECAY * self.moments + seen
            self.moments = torch.where(moments.isfinite().all(), moments, self.moments)
            own, both = self.moments.split([student.shape[1], teacher.shape[1]], dim=1)
            ridge = _RIDGE * own.diagonal().mean() + 1e-12
            weight, _ = torch.linalg.solve_ex(own + ridge * torch.eye(len(own), device=own.device), both)
        return student @ weight

    def state(self) -> dict[str, Tensor]:
        """Return what `load` takes."""
        return {"moments": self.moments}

    def load(self, saved: dict[str, Tensor]) -> None:
        """Load a saved state; ValueError if it is of embeddings of other sizes."""
        if fault := tensor_fault(saved["moments"], tuple(self.moments.shape), torch.float32):
            raise ValueError(f"moments {fault}")
        self.moments.copy_(saved["moments"])


class Teacher(NamedTuple):
    """A teacher and what the student learns from it."""

    network: nn.Module  # (b, 3, S, S) images to embeddings, in evaluation mode; an empty module until the run has its average
    image_size: int  # S, in pixels
    embedding_size: int  # numbers per face
    identity: str  # hash of its weights and of its input, or AVERAGE
    image_bytes: int  # the most memory of a forward pass, per image
    losses: dict[str, float]  # weight of each loss that is used, by its name
    mse: bool  # whether the embedding loss is mse, not cosine
    title: str  # for the log
    centres: CentreSource | None = None  # its class centres, for the loss of the logits
    temperature: float = 1.0  # of that loss
    soft_targets: SoftTargets | None = None  # of that loss; None until the run has its head
    # (images of the set, D) float32 in a file, its embeddings of all images as they are stored; None = the network
    table: np.ndarray | None = None
    rows: np.ndarray | None = None  # (images of the set,) int64, the row of the table that each image has
    projection: Projection | None = None  # for the embedding loss, of a run; None = the embeddings have the student's size

    def on(self, device: torch.device, average: nn.Module | None, head: PartialFC) -> "Teacher":
        """Return the teacher on the device of the run, for its `head`, or the average of its weights if that is the teacher."""
        if self.identity == AVERAGE:
            assert average is not None, "a rule asks for train.ema"
            return self._replace(network=average)
        network = self.network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        targets = None if self.centres is None else SoftTargets(head, self.centres, self.temperature)
        own, other = head.embedding_size, self.embedding_size
        mapped = f"{PREFIX}embedding" in self.losses and own != other
        projection = Projection(own, other, device) if mapped else None
        return self._replace(network=network, soft_targets=targets, projection=projection)

    def beside(self, memory: BackboneMemory, device: torch.device, recorded: bool) -> BackboneMemory:
        """Return the memory of the backbone and of the teacher, whose pass is over before; a CUDA graph keeps its own."""
        loaded = device.type == "cpu"  # what is free was measured after it
        own = 0 if loaded else sum(tensor.nbytes for tensor in self.network.state_dict().values())
        return BackboneMemory(memory.parameters + own, (sum if recorded else max)((memory.per_image, self.image_bytes)))

    def describe(self) -> str:
        """Return one line for the log."""
        kinds = {f"{PREFIX}embedding": "mse of the embeddings" if self.mse else "cosine of the embeddings"}
        losses = (f"{weight:g} x {kinds.get(name, name.removeprefix(PREFIX))}" for name, weight in self.losses.items())
        how = "" if self.projection is None else ", after the best linear map of the student's"
        return f"{self.title}, {self.embedding_size} numbers per face{how}; the loss has {', '.join(losses)}"

    @torch.no_grad()
    def embed(self, parts: Sequence[tuple[Tensor, Tensor]], indices: Tensor) -> Tensor:
        """Return (b, D) float embeddings of the images (., H, W, 3) uint8 and mirrored (.,) bool of all parts together.

        Args:
            indices: (b,) int64 on the CPU, of the images in their set. A table is of one set, and so of one part.
        """
        if self.table is not None and self.rows is not None:
            rows, device = torch.from_numpy(self.table[self.rows[indices.numpy()]]), parts[0][0].device
            return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
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
            elif name == f"{PREFIX}logits":
                assert self.soft_targets is not None
                value = self.soft_targets.loss(student, teacher)
            else:
                own = student
                if self.projection is not None:
                    pair = (student, teacher) if self.mse else (_normalise(student), _normalise(teacher))
                    own = self.projection(*pair, collectives)
                value = embedding_loss(own, teacher, self.mse, collectives)
            found[name] = (value, weight)
        return found


class SumOverRanks(torch.autograd.Function):
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
    return SumOverRanks.apply(each.sum() / (len(student) * collectives.world_size), 1.0, collectives)


def relation_loss(student: Tensor, teacher: Tensor, collectives: Collectives) -> Tensor:
    """Return the mean squared difference () between the cosines of all pairs of images; see `Teacher.compare`."""
    own, taught = _normalise(student), _normalise(teacher)
    differences = own @ collectives.all_gather(own.detach()).t() - taught @ collectives.all_gather(taught).t()
    total = differences.square().sum() / (len(own) * collectives.world_size) ** 2
    # each pair stands twice in the matrix, and autograd sees the image that is in this rank's rows, not in the columns
    return SumOverRanks.apply(total, 2.0, collectives)


def _normalise(embeddings: Tensor) -> Tensor:
    return functional.normalize(embeddings, dim=1, eps=1e-12)


class _Options(Parser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; teacher.options are those that name a network to face eval")


def open_teacher(config: EasyDict, dataset: FaceDataset) -> Teacher | None:
    """Return the teacher of a configuration, on the CPU, None if there is none; ValueError if it cannot be read.

    A table must be of the training set, `dataset`.
    """
    section, size, dim = config.teacher, config.data.image_size, config.backbone.embedding_size
    losses = {f"{PREFIX}{name}": section[name] for name in ("embedding", "relations", "logits") if section[name]}
    mse = section.embedding_loss == "mse"
    if section.path == AVERAGE:
        return Teacher(nn.Module(), size, dim, AVERAGE, 0, losses, mse, "the moving average of the weights")
    if not section.path:
        return None
    if section.path.endswith(".npy"):
        return _open_table(section, dataset, losses)
    with prefix_errors("teacher.path"):
        network = read_network(section.path, section.options, config.run.threads)
        model = network.model.requires_grad_(False).eval()
        with torch.no_grad(), largest_output(model) as largest:
            given = model(torch.zeros(1, 3, network.image_size, network.image_size)).shape[1]
    with prefix_errors("teacher.logits"):
        centres = _centres(network, given) if section.logits else None
    # the input and output of a layer, and what goes around it
    memory, kind = 3 * largest[0], (mse, network.title, centres, section.temperature)
    return Teacher(model, network.image_size, given, network.identity, memory, losses, *kind)


def _open_table(section: EasyDict, dataset: FaceDataset, losses: dict[str, float]) -> Teacher:
    """Return a teacher whose embeddings of the set were written by `face embed`."""
    with prefix_errors("teacher.path"):
        faces = read_table(Path(section.path))
        indices, people = indices_of(faces.names, dataset), dataset.people()
        rows = indices.argsort()
        if not np.array_equal(indices[rows], range(len(people))) or faces.people != people[indices].tolist():
            raise ValueError(
                f"{section.path} must have a row for each of the {dataset.num_stored} images of data.path, with their labels, "
                f"got {len(faces.names)} rows; write it with face embed NETWORK SET --out {section.path}"
            )
    some = faces.vectors[rows[:: -(-len(rows) // _SAMPLED)]]
    identity = digest_tensors({"norms": torch.from_numpy(faces.norms[rows]), "vectors": torch.from_numpy(some)})
    mse, size = section.embedding_loss == "mse", faces.vectors.shape[1]
    return Teacher(nn.Module(), 0, size, identity, 0, losses, mse, f"the table {section.path}", table=faces.vectors, rows=rows)


def _centres(network: Network, dim: int) -> CentreSource:
    """Return the class centres that a teacher was trained with."""
    if not Path(network.name).is_dir():
        raise ValueError(f"needs the class centres of the teacher, of a run or checkpoint; {network.name} has none")
    source = open_centres(Path(network.name))
    if source.sub_centers > 1 or source.embedding_size != dim:
        raise ValueError(f"{source.name} must have one centre of {dim} numbers for each class; set teacher.logits=0")
    return source


def read_network(path: str, options: str, threads: int) -> Network:
    """Return the network at a path, as `face eval` opens it with these options, on the CPU; threads: 0 = those of torch."""
    parser = _Options(add_help=False)
    add_choice_of_network(parser)
    given = parser.parse_args([*shlex.split(options), "--", path])
    given.threads = threads or torch.get_num_threads()
    return load_network(given, build_backbone)


def centre_bytes(teacher: Teacher, config: EasyDict, task: Any, head: HeadConfig, count: int, device: torch.device) -> int:
    """Return the bytes of the loss of the logits in one of `count` processes; ValueError if the teacher has other classes."""
    if teacher.centres is None:
        return 0
    found, own = teacher.centres.num_classes, task.dataset.num_classes
    if found != own:
        raise ValueError(
            f"teacher.logits needs a teacher of the {own} classes of the data, got {found} in {teacher.centres.name}"
        )
    chunk = head.chunk or auto_chunk(device.type, head.matmul_dtype)
    rows = config.train.batch_size // config.train.accumulation
    return bytes_of(-(-own // count), rows, teacher.centres, config.backbone.embedding_size, chunk)


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
