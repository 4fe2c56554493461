"""The recipes of configs/ are those of arcface_torch's files of the same name, and say what batch their figures belong to."""

from pathlib import Path

import pytest

import train
from configs import load_config
from configs.loader import SCHEMA
from scripts.arcface_torch import import_config as import_arcface_config

DATA = {"ms1mv2": (85742, 5822653), "ms1mv3": (93431, 5179510), "glint360k": (360232, 17091657), "wf42m": (2059906, 42474557)}
ARCFACE, COSFACE = (1.0, 0.5, 0.0), (1.0, 0.0, 0.4)
# name: network, (m1, m2, m3), sample rate, images per GPU, GPUs, lr, weight decay, epochs, warm-up epochs, steps per validation
# typed from arcface_torch's configs/NAME.py; the GPUs from its README, and from the total batch in its logs
PUBLISHED = {
    "ms1mv2_r50": ("r50", ARCFACE, 1.0, 128, 8, 0.1, 5e-4, 20, 0, 2000),
    "ms1mv2_r100": ("r100", ARCFACE, 1.0, 128, 8, 0.1, 5e-4, 20, 0, 2000),
    "ms1mv2_mbf": ("mbf", ARCFACE, 1.0, 128, 8, 0.1, 1e-4, 40, 0, 2000),
    "ms1mv3_r50": ("r50", ARCFACE, 1.0, 128, 8, 0.1, 5e-4, 20, 0, 2000),
    "ms1mv3_r100": ("r100", ARCFACE, 1.0, 128, 8, 0.1, 5e-4, 20, 0, 2000),
    "glint360k_r50": ("r50", COSFACE, 1.0, 128, 8, 0.1, 1e-4, 20, 0, 2000),
    "glint360k_r100": ("r100", COSFACE, 1.0, 128, 8, 0.1, 1e-4, 20, 0, 2000),
    "wf42m_pfc02_r100": ("r100", COSFACE, 0.2, 128, 8, 0.1, 5e-4, 20, 0, 10000),
    "wf42m_pfc02_16gpus_r100": ("r100", COSFACE, 0.2, 256, 16, 0.3, 5e-4, 20, 1, 2000),
}
SHIPPED = {path.stem for path in SCHEMA.parent.glob("*.yaml")} - {"base", "demo_cpu"}


def test_every_shipped_recipe_is_compared_here():
    assert set(PUBLISHED) == SHIPPED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_what_the_importer_makes_of_its_source(name: str, tmp_path: Path):
    network, margins, rate, batch, gpus, lr, decay, epochs, warmup, verbose = PUBLISHED[name]
    classes, images = DATA[name.split("_")[0]]
    given = {
        "margin_list": margins, "network": network, "embedding_size": 512, "sample_rate": rate, "fp16": True, "momentum": 0.9,
        "weight_decay": decay, "batch_size": batch, "lr": lr, "verbose": verbose, "rec": "/d", "num_classes": classes,
        "num_image": images, "num_epoch": epochs, "warmup_epoch": warmup, "val_targets": ["lfw", "cfp_fp", "agedb_30"],
    }  # fmt: skip
    theirs, imported = tmp_path / "theirs.py", tmp_path / "imported.yaml"
    theirs.write_text("config = edict()\n" + "".join(f"config.{key} = {value!r}\n" for key, value in given.items()))
    assert import_arcface_config.main([str(theirs), "--gpus", str(gpus), "--out", str(imported)]) == 0
    ours, other = (load_config(path, (), train.NAMED) for path in (SCHEMA.with_name(f"{name}.yaml"), imported))
    for section in ("backbone", "loss", "head", "optimizer", "schedule", "eval"):
        assert ours[section] == other[section], section
    assert {**ours.train, "precision": "fp16"} == other.train and ours.train.precision == "bf16"  # see docs/migration.md
    assert (ours.data.num_classes, ours.data.num_images) == (other.data.num_classes, other.data.num_images)
    # the same against the table itself, so that a mistake of the importer cannot hide one of a recipe
    margin = 0.5 if margins == ARCFACE else 0.4
    assert (ours.loss.name, ours.loss.margin, ours.loss.scale) == ({0.5: "arcface", 0.4: "cosface"}[margin], margin, 64.0)
    assert (ours.train.batch_size, ours.train.accumulation, ours.train.epochs) == (batch * gpus, 1, epochs)
    assert (ours.optimizer.name, ours.optimizer.lr, ours.optimizer.momentum, ours.optimizer.weight_decay) == (
        "sgd",
        lr,
        0.9,
        decay,
    )
    assert (ours.head.lr_factor, ours.head.weight_decay, ours.head.sample_rate) == (1.0, -1.0, rate)  # centres: as the backbone
    assert (ours.schedule.power, ours.schedule.warmup_epochs) == (2.0, warmup)
    assert (ours.data.num_classes, ours.data.num_images, ours.eval.every) == (classes, images, verbose)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_names_its_source_and_the_batch_of_its_figures(name: str):
    gpus, batch = PUBLISHED[name][4], PUBLISHED[name][3] * PUBLISHED[name][4]
    comments = [line for line in SCHEMA.with_name(f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    assert f"arcface_torch's configs/{name}.py with {gpus} GPUs: batch {batch}." in comments[1]
    assert comments[2].startswith(
        (f"# Its published log, batch {batch}, best of each set:", "# Its published table for one machine,")
    )
    assert f"--nproc_per_node={min(8, gpus)}" in comments[0] and ("--nnodes=2" in comments[0]) == (gpus == 16)
