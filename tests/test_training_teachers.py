"""Teachers: each loss against a float64 reference over the whole batch, and whole runs that learn from another network."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from dense_reference import all_centres
from pictures import folder_of_people
from rounding import rounding_bound
from tiny_runs import (
    ended_well,
    equal_weights,
    final_weights,
    read_metrics,
    reshard_and_back,
    run_program,
    tiny_run,
    write_dataset,
)
from torch import Tensor, nn

import train
from backbones import build_backbone
from data.augment import prepare
from data.datasets import open_set
from data.sampler import SampleOrder
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.collectives import Collectives
from partial_fc.init import CentreSource
from scripts.deploy import embed
from training.step import LossTerm, backward
from training.teachers import Projection, SoftTargets, Teacher, largest_output, read_network
from utils import distributed
from utils.checkpoint.format import BACKBONE, EMA, list_checkpoints
from utils.checkpoint.reading import read_file
from utils.distributed import World
from utils.files import write_csv
from utils.memory import BackboneMemory

SAMPLES, DIM, OTHER = 12, 5, 7  # of the global batch
KINDS = ("cosine", "mse", "relations", "mapped cosine", "mapped mse")


def _data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (DIM, DIM, OTHER)
    images, near, other = (torch.randn(SAMPLES, size, generator=generator, dtype=torch.float64) for size in sizes)
    return images, near, other


def _reference(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    """Return the loss of a micro-batch, image by image and pair by pair."""

    def cosine(one: Tensor, two: Tensor) -> Tensor:
        return (one * two).sum() / (one.norm() * two.norm())

    if kind == "cosine":
        return torch.stack([1 - cosine(e, f) for e, f in zip(student, teacher, strict=True)]).mean()
    if kind == "mse":
        return torch.stack([((e - f) ** 2).sum() / len(f) for e, f in zip(student, teacher, strict=True)]).mean()
    count = range(len(student))
    pairs = [(cosine(student[i], student[j]) - cosine(teacher[i], teacher[j])) ** 2 for i in count for j in count]
    return torch.stack(pairs).mean()


def _map(kind: str, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the ridge regression (D, E) of all micro-batches so far, by the normal equations of their weighted rows."""
    weights = [0.99 ** ((len(seen) - 1 - number) / 2) for number in range(len(seen))]
    pairs = [[nn.functional.normalize(x) if kind == "mapped cosine" else x for x in pair] for pair in seen]
    e, f = (np.concatenate([w * pair[k].detach().numpy() for w, pair in zip(weights, pairs, strict=True)]) for k in (0, 1))
    ridge = 1e-3 * (e**2).sum() / DIM
    rows = np.concatenate([e, np.sqrt(ridge) * np.eye(DIM)])
    return torch.from_numpy(np.linalg.lstsq(rows, np.concatenate([f, np.zeros((DIM, OTHER))]), rcond=None)[0])


def _layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(DIM, DIM)


def _compare(rank: int, world_size: int, accumulation: int) -> None:
    world, share = World(rank, world_size, rank, world_size, torch.device("cpu")), SAMPLES // (world_size * accumulation)
    for kind in KINDS:
        images, near, other = _data()
        taught, mapped = near if kind in ("cosine", "mse") else other, kind.startswith("mapped")
        dense, expected = _layer().double(), torch.zeros((), dtype=torch.float64)
        seen: list[tuple[Tensor, Tensor]] = []
        for part, answers in zip(images.chunk(accumulation), taught.chunk(accumulation), strict=True):
            given = dense(part)
            seen.append((given, answers))
            if mapped:  # at the best map, which is no variable of the loss
                given = (nn.functional.normalize(given) if kind == "mapped cosine" else given) @ _map(kind, seen)
            expected = expected + 3 * _reference(kind.removeprefix("mapped "), given, answers) / accumulation
        expected.backward()
        name = "teacher_relations" if kind == "relations" else "teacher_embedding"
        projection = Projection(DIM, OTHER) if mapped else None
        teacher = Teacher(nn.Module(), 1, DIM, "", 0, {name: 3.0}, kind.endswith("mse"), "", projection=projection)
        layer, found = _layer(), 0.0
        model = distributed.as_data_parallel(layer, world)
        for micro_step in range(accumulation):
            rows = slice(begin := (micro_step * world_size + rank) * share, begin + share)
            with distributed.gradients_shared(model, now=micro_step == accumulation - 1):
                losses = teacher.compare(model(images[rows].float()), taught[rows].float(), Collectives(world_size))
                terms = [LossTerm(name, value, weight=weight) for name, (value, weight) in losses.items()]
                found += 3 * float(backward(terms, world_size, 1.0, accumulation)[name]) / accumulation
        gradient, exact = layer.weight.grad, dense.weight.grad
        assert gradient is not None and exact is not None
        bound = rounding_bound(torch.float32, SAMPLES * SAMPLES)  # sums over pairs, of products of sums over a few numbers
        bound *= 1e3 if mapped else 1  # the condition of the ridge regression is at most 1 / _RIDGE
        assert found == pytest.approx(float(expected.detach()), rel=bound)
        assert float((gradient.double() - exact).norm()) < bound * float(exact.norm())


@pytest.mark.numeric
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_each_loss_has_the_gradient_of_the_whole_batch(run_ranks: Callable[..., None], world_size: int, accumulation: int):
    run_ranks(_compare, world_size, accumulation)


CLASSES, SCALE, TEMPERATURE = 10, 8.0, 2.0


@mock.patch("training.teachers._BLOCK", 3)  # several blocks, as of more than 65536 classes
def _soft(rank: int, world_size: int, parts: int, storage: str, embeddings: Tensor, taught: Tensor, matrix: Tensor) -> None:
    source = CentreSource("", CLASSES, OTHER, lambda labels: matrix[torch.from_numpy(labels)].float())
    config = HeadConfig(optimizer=RowSGD(0.0, 0.0), chunk=3, storage=storage)
    head = PartialFC(build_margin("cosface", scale=SCALE, margin=0.2), CLASSES, DIM, rank, world_size, 3, config)
    share = SAMPLES // (world_size * parts)
    targets, given, value = SoftTargets(head, source, TEMPERATURE), embeddings.float().requires_grad_(), torch.zeros(())
    for part in range(parts):
        rows = slice(begin := (part * world_size + rank) * share, begin + share)
        value = value + targets.loss(given[rows], taught[rows].float()) / parts
    value.backward()
    dense = embeddings.clone().requires_grad_()
    centres = all_centres(CLASSES, DIM, seed=3).double()
    centres = centres.bfloat16().double() if storage == "lean" else centres
    log_q, log_p = (
        (SCALE / TEMPERATURE * nn.functional.normalize(x) @ nn.functional.normalize(w).t()).log_softmax(1)
        for x, w in ((dense, centres), (taught, matrix))
    )
    expected = TEMPERATURE**2 * nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    expected.backward()
    assert dense.grad is not None and given.grad is not None
    bound = SCALE * rounding_bound(torch.float32, CLASSES + DIM)
    assert float(value.detach()) == pytest.approx(float(expected.detach()), abs=bound) and float(value.detach()) > 0.05
    own = given.grad.abs().sum(dim=1) > 0  # the rows of this rank
    assert own.sum() == parts * share
    assert float((given.grad.double() - dense.grad)[own].norm()) < bound * float(dense.grad.norm())


@pytest.mark.numeric
def test_the_logits_are_of_centres_that_are_up_to_date():
    values = []
    for saves in (False, True):
        config = HeadConfig(0.2, RowSGD(0.9, 0.0), inactive_rows="decay")
        head = PartialFC(build_margin("cosface", scale=SCALE, margin=0.2), CLASSES, DIM, config=config)
        generator = torch.Generator().manual_seed(4)
        source = CentreSource("", CLASSES, DIM, lambda labels: torch.eye(CLASSES, DIM)[torch.from_numpy(labels)])
        for step in range(5):
            head.begin_step(torch.randint(CLASSES, (1, 2), generator=generator), step)
            x = torch.randn(2, DIM, generator=generator)
            values.append(float(SoftTargets(head, source, TEMPERATURE).loss(x, x.flip(0))) if step == 4 else 0.0)
            head(x)
            head.step(1.0)
            if saves:
                head.shard_state()
    assert values[4] == pytest.approx(values[9], rel=SCALE * rounding_bound(torch.float32, CLASSES + DIM))


def _all_soft(rank: int, world_size: int, parts: int) -> None:
    images, _, other = _data()
    matrix = torch.randn(CLASSES, OTHER, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for storage in ("exact", "lean"):
        _soft(rank, world_size, parts, storage, images, other, matrix)


@pytest.mark.numeric
@pytest.mark.parametrize(("world_size", "parts"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_the_logits_have_the_gradient_of_all_classes_and_images(run_ranks: Callable[..., None], world_size: int, parts: int):
    run_ranks(_all_soft, world_size, parts)


def _loss(run: Path, step: int = 1, name: str = "embedding") -> float:
    return read_metrics(run)[step][f"loss_teacher_{name}"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a set and a run of four steps, `old`."""
    folder = tmp_path_factory.mktemp("teachers")
    write_dataset(folder)
    run = tiny_run(folder, folder, "eval.targets=[]", "train.max_steps=4", "run.name=old", image_size=48)
    assert (ended := run_program(train.main, [run])).returncode == 0, ended.stderr
    return folder


FOUR_STEPS = ("eval.targets=[]", "checkpoint.every=2", "train.max_steps=4", "teacher.embedding=2")
SHARED = (*FOUR_STEPS, "teacher.relations=3", "teacher.logits=0.5")


def test_a_run_with_a_teacher_resumes_to_the_same_bits_and_only_with_this_teacher(place: Path, tmp_path: Path):
    run = functools.partial(tiny_run, place, tmp_path, *SHARED, f"teacher.path={place / 'old'}", image_size=48)
    assert (ended := run_program(train.main, [run("run.name=whole")] * 2)).returncode == 0, ended.stderr
    assert "16 numbers per face; the loss has 2 x cosine of the embeddings, 3 x relations, 0.5 x logits" in ended.stdout
    reshard_and_back(tmp_path / "whole" / "checkpoints" / "step_00000002", tmp_path / "broken")
    assert (ended := run_program(train.main, [run("run.name=broken")] * 2)).returncode == 0, ended.stderr
    equal_weights(tmp_path / "whole", tmp_path / "broken")
    ends = [tmp_path / name / "checkpoints" / "step_00000004" for name in ("whole", "broken")]
    whole, broken = ({path.name for path in end.iterdir()} for end in ends)
    assert whole == broken and "teacher" not in " ".join(whole)
    last = read_metrics(tmp_path / "whole")[1]
    assert read_metrics(tmp_path / "broken")[4]["loss"] == read_metrics(tmp_path / "whole")[4]["loss"]
    plain = tiny_run(place, tmp_path, "eval.targets=[]", "train.max_steps=1", "run.name=plain", image_size=48)
    assert run_program(train.main, [plain] * 2).returncode == 0  # the first loss of the labels alone
    of_labels = read_metrics(tmp_path / "plain")[1]["loss"]
    taught = [last[f"loss_teacher_{name}"] for name in ("embedding", "relations", "logits")]
    assert last["loss"] == pytest.approx(of_labels + np.dot([2, 3, 0.5], taught), rel=1e-6) and min(taught) > 0
    other = ["run.name=broken", "train.max_steps=5", f"teacher.path={place / 'old' / 'checkpoints' / 'step_00000004'}"]
    assert (ended := run_program(train.main, [run(*other)])).returncode == 0, ended.stderr  # the same weights elsewhere
    other[1:] = ["train.max_steps=6", f"teacher.path={tmp_path / 'plain'}"]
    ended = run_program(train.main, [run(*other)])
    assert ended.returncode == 1 and re.search("teacher was [0-9a-f]{32}, this run has [0-9a-f]{32}", ended.stderr)


def test_a_run_that_is_its_own_teacher_does_not_depend_on_when_it_saves_or_resumes(place: Path, tmp_path: Path):
    """A save gives all processes the statistics of the first one; the teacher of each of two processes has those always."""
    shared = ["teacher.path=average", "teacher.embedding=5", "train.ema=0.9", "train.max_steps=4", "eval.targets=[]"]
    shared += ["train.accumulation=2", "checkpoint.keep_last=9"]
    for name, every in (("often", 1), ("once", 4), ("broken", 4)):
        if name == "broken":
            reshard_and_back(list_checkpoints(tmp_path / "often")[1], tmp_path / name)
        run = tiny_run(place, tmp_path, *shared, f"checkpoint.every={every}", f"run.name={name}", image_size=48)
        assert (ended := run_program(train.main, [run] * 2)).returncode == 0, ended.stderr
        equal_weights(tmp_path / "often", tmp_path / name)


@pytest.mark.numeric
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_the_average_teaches_what_it_was_before_the_step(place: Path, tmp_path: Path, world_size: int, accumulation: int):
    words = ["teacher.path=average", "teacher.embedding=5", "train.ema=0.9", "train.max_steps=3", "eval.targets=[]"]
    words += ["checkpoint.every=1", "checkpoint.keep_last=9", "backbone.freeze_norm=true", "data.flip=false"]
    words += [f"train.accumulation={accumulation}"]
    run = tiny_run(place, tmp_path, *words, f"init.backbone={place / 'old'}", image_size=48, batch_size=12)
    ended_well(run_program(train.main, [run] * world_size))
    dataset = open_set(place)
    for checkpoint in list_checkpoints(tmp_path / "tiny")[:2]:  # after as many steps
        step = int(checkpoint.name[-8:])
        rows = SampleOrder(60, 12, 2048, flip=False).samples(step).indices
        pixels = np.stack([dataset.pixels_and_label(int(row), 48)[0] for row in rows])
        images, found = prepare(torch.from_numpy(pixels), torch.zeros(len(rows), dtype=torch.bool)).double(), []
        for name in (BACKBONE, EMA):
            network = build_backbone("shallow", 16, 0.125, image_size=48).eval()
            network.load_state_dict(read_file(checkpoint, name))
            found.append(network.double()(images).detach())
        expected, bound = float(_reference("cosine", *found)), rounding_bound(torch.float32, 24 * 24 * 16)  # of the last layer
        assert _loss(tmp_path / "tiny", step + 1) == pytest.approx(expected, abs=bound) and expected > 8 * bound


def _first(place: Path, tmp_path: Path, name: str, *more: str, image_size: int = 48) -> float:
    """Return the embedding loss of the first step."""
    shared = ("eval.targets=[]", "train.max_steps=1", f"run.name={name}", "teacher.embedding=1", *more)
    assert train.main(tiny_run(place, tmp_path, *shared, image_size=image_size)) == 0
    return _loss(tmp_path / name)


def test_a_teacher_that_is_the_student_has_nothing_to_say(place: Path, tmp_path: Path):
    shared = [f"init.backbone={place / 'old'}", "backbone.freeze_norm=true"]
    assert abs(_first(place, tmp_path, "run", *shared, f"teacher.path={place / 'old'}")) < 1e-6
    # of which the average of its own weights is one, before the first step
    average = [*shared, "teacher.path=average", "train.ema=0.9", "teacher.relations=1", "teacher.embedding_loss=mse"]
    assert abs(_first(place, tmp_path, "average", *average)) < 1e-9 > _loss(tmp_path / "average", name="relations")
    logits = [*shared, f"init.head={place / 'old'}", f"teacher.path={place / 'old'}", "teacher.logits=1"]
    assert _first(place, tmp_path, "logits", *logits) < 1e-6 and abs(_loss(tmp_path / "logits", name="logits")) < 1e-5
    _first(place, tmp_path, "random", *shared[1:], *logits[3:])
    _first(place, tmp_path, "warm", *shared[1:], *logits[3:], "loss.scale=32", "teacher.temperature=2")  # the same quotient
    of_random, of_warm = (_loss(tmp_path / name, name="logits") for name in ("random", "warm"))
    assert of_random > 0.1 and of_warm == pytest.approx(4 * of_random, rel=1e-5)
    assert _first(place, tmp_path, "other", *shared[1:], f"teacher.path={place / 'old'}") > 0.1
    of_logits, without = (final_weights(tmp_path / name) for name in ("random", "other"))
    changed = {name for name, value in of_logits.items() if not torch.equal(value, without[name])}
    assert changed and {"centres", "momentum"} <= of_logits.keys() - changed


@pytest.mark.filterwarnings("ignore")
def test_the_same_teacher_as_a_run_and_as_a_file_of_it(place: Path, tmp_path: Path):
    pytest.importorskip("onnxruntime")
    from scripts.deploy import export

    of_run = _first(place, tmp_path, "run", f"teacher.path={place / 'old'}")
    for form, more in (("onnx", []), ("pt2", ["teacher.options=--trust-code"])):
        assert export.main([str(place / "old"), "--out", str(tmp_path / f"teacher.{form}")]) == 0
        of_file = _first(place, tmp_path, form, f"teacher.path={tmp_path / f'teacher.{form}'}", *more)
        assert of_file == pytest.approx(of_run, abs=1e-4) and of_run > 0.1
    # it gets images of its size
    assert _first(place, tmp_path, "larger", f"teacher.path={tmp_path / 'teacher.onnx'}", image_size=64) > 0.1


@pytest.mark.numeric
def test_a_teacher_of_another_size_gets_the_images_scaled_by_a_triangle_as_wide_as_two_of_its_pixels():
    images = torch.randint(0, 256, (2, 64, 64, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    weights = torch.stack([1 - ((torch.arange(64) + 0.5) * 48 / 64 - (k + 0.5)).abs() for k in range(48)]).clamp_min(0)
    weights /= weights.sum(1, keepdim=True)
    expected = weights @ ((images.permute(0, 3, 1, 2).float() - 127.5) / 127.5) @ weights.T
    found = Teacher(nn.Flatten(), 48, 3 * 48**2, "", 0, {}, False, "").embed([(images, torch.zeros(2).bool())], torch.arange(2))
    torch.testing.assert_close(found.view(expected.shape), expected, rtol=0, atol=rounding_bound(torch.float32, 9, 64))


def test_a_projection_leaves_out_a_micro_batch_that_is_not_finite():
    projection, given, taught = Projection(2, 3), torch.eye(2), torch.ones(2, 3)
    projection(given, taught, Collectives(1))
    before = projection.moments.clone()
    assert projection(given, taught / 0, Collectives(1)).isfinite().all() and before.any()
    assert torch.equal(projection.moments, before)


def test_a_table_of_the_set_teaches_each_image_its_row_and_a_run_with_it_resumes_to_the_same_bits(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    table = tmp_path / "t.npy"
    assert embed.main([str(place / "old"), str(place), "--out", str(table), "--device", "cpu", "--processes", "1"]) == 0
    drawn = np.random.default_rng(1).normal(size=np.load(table).shape)  # of a teacher that sees more than the student
    np.save(table, (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32))
    rows = torch.from_numpy(np.load(table)).double()
    dataset, model = open_set(place), read_network(str(place / "old"), "", 1).model.eval()
    pixels = np.stack([dataset.pixels_and_label(index, 48)[0] for index in range(len(rows))])
    with torch.no_grad():
        own = model(prepare(torch.from_numpy(pixels), torch.zeros(len(rows), dtype=torch.bool))).double()
    first = SampleOrder(len(rows), 12, 2048, flip=False).samples(0).indices  # run.seed
    others = [torch.roll(rows, shift, 0) for shift in range(len(rows))]
    expected, *wrong = (1 - torch.cosine_similarity(own[first], taught[first]).mean().item() for taught in others)
    assert min(abs(expected - loss) for loss in wrong) > 1e-4
    start = [f"init.backbone={place / 'old'}", "backbone.freeze_norm=true", "data.flip=false", "eval.targets=[]"]
    words = [*start, f"teacher.path={table}", "teacher.embedding=1", "train.max_steps=1"]
    for count, parts in ((1, 3), (3, 2)):
        more = [f"run.name=once_{count}", f"train.accumulation={parts}"]
        run = tiny_run(place, tmp_path, *words, *more, image_size=48, batch_size=12)
        assert (ended := run_program(train.main, [run] * count)).returncode == 0, ended.stderr
        assert _loss(tmp_path / f"once_{count}") == pytest.approx(expected, abs=1e-5)
    # of another size than the student's, whose map is a part of the checkpoint, also of one for other processes
    words = [*FOUR_STEPS, f"teacher.path={table}", "backbone.embedding_size=8", "train.accumulation=2"]
    for kind in ("mse", "cosine"):
        run = functools.partial(tiny_run, place, tmp_path, *words, f"teacher.embedding_loss={kind}", image_size=48)
        ended = ended_well(run_program(train.main, [run(f"run.name=whole_{kind}")] * 2))
        assert "16 numbers per face, after the best linear map of the student's" in ended.stdout
        reshard_and_back(tmp_path / f"whole_{kind}" / "checkpoints" / "step_00000002", tmp_path / kind)
        ended_well(run_program(train.main, [run(f"run.name={kind}")] * 2))
        equal_weights(tmp_path / f"whole_{kind}", tmp_path / kind)
    lines = table.with_suffix(".csv").read_text().splitlines()
    other = [*lines[:3], re.sub("^2,0,2,", "2,0,3,", lines[3]), *lines[4:]]
    norms = [*lines[:3], re.sub(",[0-9.]+,0.0000,", ",1.5,0.0000,", lines[3]), *lines[4:]]
    for text, reason in ((other, "with their labels, got 60 rows"), (norms, "teacher was [0-9a-f]{32}, this run has")):
        table.with_suffix(".csv").write_text("\n".join(text) + "\n")
        assert train.main([*run("run.name=cosine", "train.max_steps=5")]) == 1
        assert re.search(reason, capsys.readouterr().err)


def test_a_table_of_a_folder_teaches_by_the_names_of_its_pictures_in_any_order(tmp_path: Path):
    folder_of_people(tmp_path / "people", [3] * 4)
    names = [f"person_{person}/{number}.jpg" for person in range(4) for number in range(3)]
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(12, 16))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    losses, teachers = [], []
    orders = ((range(12), range(12)), (turned := rng.permutation(12), turned), (range(12), turned))
    for name, (order, rows) in zip("abc", orders, strict=True):
        np.save(tmp_path / "t.npy", vectors[list(rows)])
        texts = [(names[number], 0, names[number].partition("/")[0], 1.0) for number in order]
        write_csv(tmp_path / "t.csv", ("name", "face", "person", "norm"), texts)
        words = ["data.source=folder", "eval.targets=[]", f"teacher.path={tmp_path / 't.npy'}", "teacher.embedding=1"]
        assert train.main(tiny_run(tmp_path / "people", tmp_path, *words, "train.max_steps=1", f"run.name={name}")) == 0
        losses.append(_loss(tmp_path / name))
        manifest = json.loads((tmp_path / name / "checkpoints" / "step_00000001" / "manifest.json").read_text())
        teachers.append(manifest["run_signature"]["teacher"])
    assert losses[0] == losses[1] and teachers[0] == teachers[1] != teachers[2] and abs(losses[2] - losses[0]) > 1e-3


WRONG = {
    "teacher.path=t.npy teacher.logits=1": "teacher.path, a table, goes without tasks, data.sources, teacher.logits",
    "teacher.path=t.npy teacher.relations=1 data.path='' data.sources=[{source:\xa0folder,path:\xa0p}]": "a table, goes "
    "without tasks, data.sources",
    "teacher.path=t.npy teacher.relations=1 teacher.options=--ema": "teacher.options is for a file or a run",
    "teacher.path=t.npy teacher.relations=1": "teacher.path: t.npy: cannot be read: No such file",
    "teacher.path=nowhere": "teacher.path=nowhere needs a weight above 0, got none; set teacher.embedding, relations or logits",
    "teacher.relations=1": "teacher.embedding, relations and logits need teacher.path, got ''",
    "teacher.path=average teacher.relations=1": "teacher.path=average needs train.ema, the decay of that average, got 0",
    "teacher.path=average teacher.relations=1 train.ema=0.9 teacher.options=--ema": "teacher.options is for a file or a run",
    "teacher.path=nowhere teacher.relations=1": "teacher.path: no run folder, checkpoint or weights file at nowhere",
    "teacher.path=OLD teacher.relations=1 teacher.options=--emma": "teacher.path: unrecognized arguments: --emma",
    "teacher.path=OLD teacher.relations=1 teacher.options=--ema": "has no moving average, because the run had train.ema=0",
    "teacher.path=OLD teacher.logits=1 head.sub_centers=2": "teacher.logits goes without tasks, teacher.path=average",
    "teacher.path=OLD teacher.logits=1 data.source=synthetic data.num_images=40 data.num_classes=9": "teacher.logits needs a "
    "teacher of the 9 classes of the data, got 12 in",
    "teacher.path=FILE teacher.logits=1 teacher.options=HOW": "teacher.logits: needs the class centres of the teacher, of",
    "teacher.path=OLD teacher.embedding=-1": "teacher.embedding must be from 0 to 1000000, got -1",
    "teacher.path=OLD teacher.embedding_loss=l1": "teacher.embedding_loss must be one of cosine, mse, got 'l1'",
    "tasks=[{name:\xa0teacher_relations}]": "tasks[0].name must be its own",
}


@pytest.mark.parametrize("given", WRONG)
def test_wrong_teachers_are_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str):
    weights = place / "old" / "checkpoints" / "step_00000004" / "backbone.safetensors"
    how = "--backbone shallow --width 0.125 --embedding-size 16 --image-size 48"
    known = {"OLD": str(place / "old"), "FILE": str(weights), "HOW": how, "\xa0": " "}
    words = given.split(" ")
    for short, text in known.items():
        words = [word.replace(short, text) for word in words]
    assert train.main([*tiny_run(place, tmp_path, *words, "eval.targets=[]", image_size=48), "--check"]) == 1
    assert WRONG[given] in capsys.readouterr().err


def test_a_teacher_of_another_size_opens_and_may_come_late(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["teacher.relations=1", f"teacher.path={place / 'old'}", "backbone.embedding_size=8", "eval.targets=[]"]
    assert train.main([*tiny_run(place, tmp_path, *words, image_size=64), "--check"]) == 0
    assert "nothing wrong was found" in capsys.readouterr().out
    # a loss with a projection may begin where the run goes on
    for more in (["train.max_steps=1"], ["train.max_steps=3", "teacher.embedding=5"]):
        ended_well(run_program(train.main, [tiny_run(place, tmp_path, *words, *more, image_size=48)]))
    assert _loss(tmp_path / "tiny", 3) > 0


def test_the_memory_of_a_teacher_counts():
    network = nn.Sequential(nn.Conv2d(3, 10, 3, padding=1), nn.Flatten(), nn.Linear(10 * 16 * 16, 4)).requires_grad_(False)
    with largest_output(network) as largest:
        network(torch.zeros(1, 3, 16, 16))
    assert largest == [4 * 10 * 16 * 16]
    teacher = Teacher(network, 16, 4, "", 300, {}, False, "")
    weights = sum(parameter.numel() for parameter in network.parameters())
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert teacher.beside(BackboneMemory(100, 200), cuda, False) == BackboneMemory(100 + 4 * weights, 300)
    assert teacher.beside(BackboneMemory(100, 200), cuda, True) == BackboneMemory(100 + 4 * weights, 500)
    assert teacher.beside(BackboneMemory(100, 400), cpu, False) == BackboneMemory(100, 400)
