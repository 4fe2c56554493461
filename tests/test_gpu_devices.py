"""On a stand-in for a GPU: runs of all features train and resume, and the tensors of each operation lie on one device."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stand_in_gpu import install, refused
from tiny_runs import ended_well, run_program, run_train, tiny_run

import train
from partial_fc.workspace import Workspace
from scripts import face
from scripts.deploy import export
from training import step


def _train(arguments: list[str]) -> int:
    """Train, and say what a GPU would refuse."""
    with install():
        status = train.main(arguments)
    print(*(f"refused: {words}" for words in sorted(refused)), sep="\n", flush=True)
    return status


def _run_programs(commands: list[str]) -> int:
    with install():
        status = max(face.main(words.split()) for words in commands)
    print(*(f"refused: {words}" for words in sorted(refused)), sep="\n", flush=True)
    return status


def _train_with_a_fault(arguments: list[str]) -> int:
    whole = step.topology_loss
    step.topology_loss = lambda images, *given: whole(images.cpu(), *given)
    return _train(arguments)


DRAWN = '"data":{"source":"synthetic","num_classes":9,"num_images":30}'
RUNS = {  # of features that do not touch each other
    "micro-batches": "train.precision=bf16 train.accumulation=2 train.ema=0.9 optimizer.name=lamb head.optimizer=sgd "
    "loss.topology=0.1 loss.entropy_weights=true loss.name=elasticface",
    "fp16": "train.precision=fp16 optimizer.name=adamw head.sample_rate=0.5 head.storage=tiny "
    "teacher.path=OLD teacher.embedding=1 teacher.embedding_loss=mse teacher.logits=1",
    "decay": "head.sample_rate=0.5 head.inactive_rows=decay head.storage=mini loss.name=kappaface loss.every=2 "
    "teacher.path=PROGRAM teacher.options=--trust-code teacher.embedding=1",
    "host": "head.sample_rate=0.5 head.placement=host head.storage=lean loss.name=magface "
    "teacher.path=average train.ema=0.9 teacher.embedding=1 teacher.relations=1",
    "neighbours": "head.sample_rate=0.5 head.sampling=neighbours head.neighbours_every=2 head.neighbours_search=inverted_lists "
    "compatible.path=OLD loss.name=adaface",
    "tasks": f'tasks=[{{"name":"a"}},{{"name":"b","batch_size":4,{DRAWN},"loss":{{"name":"arcface"}}}}] loss.name=adaptiveface',
    "lora": "backbone.name=shallow_vit data.image_size=48 backbone.lora_rank=2 init.backbone=VIT init.new_classes=images",
    "landmarks": "backbone.name=vit_kprpe_shallow data.image_size=48 data.landmarks=POINTS "
    "head.sub_centers=2 loss.name=curricularface loss.label_smoothing=0.1 loss.focal=1",
}
TWO = ("micro-batches", "host", "neighbours", "tasks")  # runs of two processes


@pytest.fixture(scope="module")
def files(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two runs on a CPU, a program of one, and landmarks of the images."""
    folder = tmp_path_factory.mktemp("files")
    np.save(folder / "POINTS.npy", np.random.default_rng(0).uniform(0.2, 0.8, (30, 5, 2)).astype(np.float16))
    for name, network in {"OLD": "backbone.name=one_block", "VIT": "data.image_size=48 backbone.name=shallow_vit"}.items():
        given = [*network.split(), f"run.name={name}", "train.max_steps=2", "eval.targets=[]"]
        ended_well(run_train(1, tiny_run(dataset, folder, *given)))
    assert export.main([str(folder / "OLD"), "--out", str(folder / "PROGRAM.pt2")]) == 0
    return {name.partition(".")[0]: folder / name for name in ("OLD", "VIT", "POINTS.npy", "PROGRAM.pt2")}


def _arguments(dataset: Path, output: Path, settings: str) -> list[str]:
    shared = ["run.device=cuda", "train.compile=off", "head.kernels=plain", "eval.every=3"]
    return tiny_run(dataset, output, "backbone.name=one_block", *shared, *settings.split())


@pytest.mark.parametrize("name", RUNS)
def test_the_tensors_of_each_operation_lie_on_one_device(dataset: Path, files: dict[str, Path], tmp_path: Path, name: str):
    settings = RUNS[name]
    for key, path in files.items():
        settings = settings.replace(f"={key}", f"={path}")
    ranks = 2 if name in TWO else 1
    for steps, words, sets in ((3, "checkpoints, log and figures", "tiny"), (5, "resumed from", "")):
        arguments = [*_arguments(dataset, tmp_path, settings), f"train.max_steps={steps}", f"eval.targets=[{sets}]"]
        said = ended_well(run_program(_train, [arguments] * ranks)).stdout
        assert f"{ranks} x cuda" in said and words in said and "refused" not in said, said


def test_the_programs_that_use_networks_and_tables_do_the_same(dataset: Path, files: dict[str, Path], tmp_path: Path):
    network, table = f"{files['VIT']} --device cuda --threads 1", f"{tmp_path / 'faces.npy'}"
    commands = [
        f"eval {network} --targets {dataset / 'tiny.bin'} --precision bf16",
        f"embed {network} {dataset} --processes 1 --ser-fiq --out {table}",
        f"robustness {network} --targets {dataset / 'tiny.bin'} --kinds blur=1 --out {tmp_path / 'hard'}",
        f"pairs {table} --out {tmp_path / 'pairs'}",
        f"cluster {table} --threshold 0.3 --out {tmp_path / 'people.csv'}",
    ]
    said = ended_well(run_program(_run_programs, [commands])).stdout
    assert "refused" not in said and "report: " in said, said


def test_a_fault_is_seen(dataset: Path, tmp_path: Path):
    arguments = _arguments(dataset, tmp_path, "backbone.name=shallow loss.topology=0.1 train.max_steps=2")
    said = run_program(_train_with_a_fault, [arguments]).stdout
    assert "refused: sub of [((7,), 'cpu'), ((7,), 'cuda:0')]" in said and said.count("refused") == 1, said


def test_the_memory_of_a_buffer_that_grows_stays_until_the_stream_of_that_moment_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    kept: list[str] = []
    workspace, used = Workspace(torch.device("cpu"), 0), SimpleNamespace(is_cuda=True, device="cuda:0", numel=lambda: 2)
    used.record_stream = kept.append
    workspace._buffers["rows", torch.float32] = used  # type: ignore[assignment]
    assert len(workspace.buffer("rows", (3,), torch.float32)) == 3 and kept == ["stream of cuda:0"]
