"""The recipes of configs/ are those of the files that they name, most of arcface_torch, and say what batch they belong to."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import train
from configs import load_config
from configs.loader import SCHEMA
from scripts.arcface_torch import import_config as import_arcface_config

DATA = {
    "ms1mv2": (85742, 5822653), "ms1mv3": (93431, 5179510), "glint360k": (360232, 17091657), "wf4m": (205990, 4235242),
    "wf12m": (617970, 12720066), "wf12m_conflict": (1017970, 12720066), "wf42m": (2059906, 42474557),
}  # fmt: skip
ARC, COS = (1.0, 0.5, 0.0), (1.0, 0.0, 0.4)
SETS = ("lfw", "cfp_fp", "agedb_30")


class Recipe(NamedTuple):
    """Values of one file of arcface_torch's configs/, typed from it; the GPUs from its name, README, or batch in its logs."""

    network: str
    margins: tuple[float, float, float]
    gpus: int
    batch_size: int = 128  # images of a micro-batch and GPU
    lr: float = 0.1
    decay: float = 5e-4
    epochs: int = 20
    warmup: int = 0
    rate: float = 1.0
    verbose: int = 2000  # micro-batches between verifications
    targets: tuple[str, ...] = SETS
    filtering: float = 0.0
    optimizer: str = "sgd"
    accumulation: int = 1


def _vit(network: str, gpus: int, batch_size: int, **others: object) -> Recipe:
    values = {"lr": 1e-3, "decay": 0.1, "epochs": 40, "warmup": 4, "rate": 0.3, "targets": (), "optimizer": "adamw", **others}
    return Recipe(network, COS, gpus, batch_size, **values)  # type: ignore[arg-type]


PUBLISHED = {
    "ms1mv2_r50": Recipe("r50", ARC, 8),
    "ms1mv2_r100": Recipe("r100", ARC, 8),
    "ms1mv2_mbf": Recipe("mbf", ARC, 8, decay=1e-4, epochs=40),
    "ms1mv3_r50": Recipe("r50", ARC, 8),
    "ms1mv3_r50_onegpu": Recipe("r50", ARC, 1, lr=0.02),
    "ms1mv3_r100": Recipe("r100", ARC, 8),
    "ms1mv3_mbf": Recipe("mbf", ARC, 8, decay=1e-4, epochs=40),
    "glint360k_r50": Recipe("r50", COS, 8, decay=1e-4),
    "glint360k_r100": Recipe("r100", COS, 8, decay=1e-4),
    "glint360k_mbf": Recipe("mbf", COS, 8, decay=1e-4),
    "wf4m_r50": Recipe("r50", COS, 8),
    "wf4m_r100": Recipe("r100", COS, 8),
    "wf4m_mbf": Recipe("mbf", COS, 8, decay=1e-4),
    "wf12m_r50": Recipe("r50", COS, 8, targets=()),
    "wf12m_r100": Recipe("r100", COS, 8, targets=()),
    "wf12m_pfc02_r100": Recipe("r100", COS, 8, rate=0.2, targets=()),
    "wf12m_mbf": Recipe("mbf", COS, 8, decay=1e-4, targets=()),
    "wf12m_flip_r50": Recipe("r50", COS, 8, warmup=2, targets=()),
    "wf12m_flip_pfc01_filter04_r50": Recipe("r50", COS, 8, warmup=2, rate=0.1, filtering=0.4, targets=()),
    "wf12m_conflict_r50": Recipe("r50", COS, 8, warmup=2, targets=()),
    "wf12m_conflict_r50_pfc03_filter04": Recipe("r50", COS, 8, warmup=2, rate=0.3, filtering=0.4, targets=()),
    "wf42m_pfc02_r100": Recipe("r100", COS, 8, rate=0.2, verbose=10000),
    "wf42m_pfc02_r100_16gpus": Recipe("r100", COS, 16, lr=0.2, warmup=2, rate=0.2, verbose=10000),
    "wf42m_pfc02_r100_32gpus": Recipe("r100", COS, 32, lr=0.4, warmup=2, rate=0.2, verbose=10000),
    "wf42m_pfc02_16gpus_r100": Recipe("r100", COS, 16, 256, lr=0.3, warmup=1, rate=0.2),
    "wf42m_pfc02_8gpus_r50_bs4k": Recipe("r50", COS, 8, 512, lr=0.4, warmup=2, rate=0.2, verbose=10000),
    "wf42m_pfc02_16gpus_r50_bs8k": Recipe("r50", COS, 16, 512, lr=0.6, warmup=4, rate=0.2, verbose=10000),
    "wf42m_pfc02_32gpus_r50_bs4k": Recipe("r50", COS, 32, lr=0.4, warmup=2, rate=0.2, verbose=10000),
    "wf42m_pfc02_16gpus_mbf_bs8k": Recipe(
        "mbf", COS, 16, 512, lr=0.4, decay=1e-4, warmup=2, rate=0.2, verbose=10000, targets=()
    ),
    "wf42m_pfc0008_32gpu_r100": Recipe("r100", COS, 32, 512, lr=0.4, warmup=2, rate=0.0),
    "wf42m_pfc03_32gpu_r18": Recipe("r18", COS, 32, lr=0.4, warmup=2, rate=0.3),
    "wf42m_pfc03_32gpu_r50": Recipe("r50", COS, 32, lr=0.4, warmup=2, rate=0.3),
    "wf42m_pfc03_32gpu_r100": Recipe("r100", COS, 32, lr=0.4, warmup=2, rate=0.3),
    "wf42m_pfc03_32gpu_r200": Recipe("r200", COS, 32, lr=0.4, warmup=2, rate=0.3),
    "wf42m_pfc03_40epoch_64gpu_vit_t": _vit("vit_t_dp005_mask0", 64, 384),
    "wf42m_pfc03_40epoch_64gpu_vit_s": _vit("vit_s_dp005_mask_0", 64, 384),
    "wf42m_pfc03_40epoch_64gpu_vit_b": _vit("vit_b_dp005_mask_005", 64, 384),
    "wf42m_pfc03_40epoch_64gpu_vit_l": _vit("vit_l_dp005_mask_005", 64, 384),
    "wf42m_pfc03_40epoch_8gpu_vit_t": _vit("vit_t_dp005_mask0", 8, 512),
    "wf42m_pfc03_40epoch_8gpu_vit_b": _vit("vit_b_dp005_mask_005", 8, 256, accumulation=12),
    "wf42m_pfc02_vit_h": _vit("vit_h", 8, 768, epochs=16, warmup=2, rate=0.5),
    "3millions": Recipe("mbf", COS, 8, 512, epochs=30, warmup=-1, rate=0.1, targets=()),
}
NO_DECAY = [
    {"match": "no_decay_norm_bias", "lr_factor": 1.0, "weight_decay": -1.0},
    {"match": "*prelu.weight", "lr_factor": 1.0, "weight_decay": 0.0},
]
# recipes of other programs: each value that is not our default, typed from their files, which the recipe names
OTHERS = {
    # github.com/mk-minchul/CVLface: run_adaface_ir101_webface4m.sh and the files that it names
    "adaface_wf4m_r100": {
        "data.num_classes": DATA["wf4m"][0], "data.num_images": DATA["wf4m"][1],
        "augment.crop": 0.2, "augment.low_resolution": 0.2, "augment.photometric": 0.2,
        "backbone.name": "r100", "backbone.dropout": 0.4,
        "loss.name": "adaface", "loss.margin": 0.4, "loss.h": 0.333, "loss.alpha": 0.01,
        "optimizer.rules": NO_DECAY, "schedule.kind": "step", "schedule.milestones": [12.0, 20.0, 24.0],
        "schedule.warmup_epochs": 1.0, "train.epochs": 26.0, "train.batch_size": 7 * 256, "train.tf32": True,
        "eval.targets": ["lfw", "agedb_30", "cfp_fp", "cplfw", "calfw"], "eval.every": 4235242 // (7 * 256),
    },
    # github.com/zzzweakman/CVPR24_FRCSyn_ADMIS: recognition_model_training/train.yaml and its program
    "frcsyn_syn30k_r50": {
        "data.source": "folder", "data.num_classes": 30_000, "augment.crop": 0.2, "backbone.dropout": 0.4,
        "schedule.kind": "step", "schedule.milestones": [22.0, 28.0, 32.0], "train.epochs": 40.0, "train.batch_size": 8 * 64,
        "optimizer.clip_norm": 0.0, "eval.targets": ["lfw", "cfp_fp", "cplfw", "agedb_30", "calfw"],
    },
    # github.com/HaiyuWu/Vec2Face/issues/1 and its README, github.com/HaiyuWu/SOTA-Face-Recognition-Train-and-Test
    "hsface10k_r50_se": {
        "data.source": "folder", "data.num_classes": 10_000, "data.num_images": 500_000,
        "augment.crop": 0.3, "augment.low_resolution": 0.3, "augment.photometric": 0.3,
        "augment.cutout": 0.5, "augment.cutout_side": round(2 * ((0.02 + 0.33) / 2) ** 0.5, 2),  # two sides, on average half
        "backbone.se": True, "backbone.dropout": 0.4,
        "optimizer.rules": [{"match": "norms", "lr_factor": 1.0, "weight_decay": 0.0}], "schedule.kind": "step",
        "schedule.milestones": [epoch - 1.0 for epoch in (12, 20, 24)], "train.epochs": 26.0, "train.batch_size": 4 * 128,
        "train.precision": "bf16", "eval.targets": ["lfw", "cfp_fp", "agedb_30", "calfw", "cplfw"],
        "eval.every": 500_000 // (4 * 128),
    },
    # github.com/TaharChettaoui/FRoundation: config/config.py, src/training and src/finetuning
    "casia_dinov2_s": {
        "data.image_size": 224, "data.num_classes": 10_572, "data.num_images": 501_195,
        "backbone.name": "timm:vit_small_patch14_dinov2.lvd142m", "backbone.embedding_size": 384,
        "backbone.lora_rank": 16, "backbone.lora_alpha": 16 * 16**0.5, "init.backbone": "dinov2.safetensors",
        "loss.name": "cosface", "loss.margin": 0.3, "optimizer.name": "adamw", "optimizer.lr": 1e-4, "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.05, "schedule.kind": "cosine", "schedule.min_lr": 1e-6, "train.epochs": 40.0,
        "train.batch_size": 512, "eval.targets": ["lfw", "cfp_fp", "cfp_ff", "agedb_30", "calfw", "cplfw"],
        "eval.every": 5 * (501_195 // 512),
    },
}  # fmt: skip
# the same: run_adaface_ir50_casia.sh
OTHERS["adaface_casia_r50"] = OTHERS["adaface_wf4m_r100"] | {
    "data.num_classes": 10_572, "data.num_images": 490_623, "backbone.name": "r50", "eval.every": 490_623 // (7 * 256)
}  # fmt: skip
for _name, _epochs in (("r50", 25.0), ("r100", 25.0), ("r200", 30.0)):
    # github.com/modelscope/facechain: face_module/TopoFR, its configs/glint360k_*.py and train.py
    OTHERS[f"glint360k_topofr_{_name}"] = {
        "data.num_classes": DATA["glint360k"][0], "data.num_images": DATA["glint360k"][1],
        "augment.blur": 0.2 / 4, "augment.blur_sigma": 5.0, "augment.grayscale": 0.2 / 4, "augment.photometric": 0.2 / 4,
        "augment.cutout": 0.2 / 4, "augment.cutout_side": 0.84, "backbone.name": _name, "backbone.trained_scale": True,
        "loss.name": "arcface", "loss.margin": 0.5, "loss.entropy_weights": True, "loss.topology": 0.1,
        "optimizer.weight_decay": 1e-4, "optimizer.clip_norm": 5.0, "train.epochs": _epochs,
        "train.batch_size": 4 * 128, "train.precision": "bf16", "eval.targets": list(SETS), "eval.every": 2000,
    }  # fmt: skip
OTHERS["adaface_wf4m_r50"] = OTHERS["adaface_wf4m_r100"] | {"backbone.name": "r50"}
OTHERS["adaface_wf12m_r100"] = OTHERS["adaface_wf4m_r100"] | {
    "data.num_classes": DATA["wf12m"][0], "data.num_images": DATA["wf12m"][1], "eval.every": DATA["wf12m"][1] // (7 * 256)
}  # fmt: skip
OTHERS["adaface_wf12m_r50"] = OTHERS["adaface_wf12m_r100"] | {"backbone.name": "r50"}
OTHERS["adaface_wf4m_vit_kprpe_b"] = OTHERS["adaface_wf4m_r100"] | {  # run_vit_kprpe_webface4m.sh
    "data.landmarks": "landmarks.npy", "augment.affine": 1.0, "augment.affine_degrees": 20 / 5, "augment.affine_scale": 0.2,
    "augment.affine_shift": 0.05, "augment.crop": 0.95 / 5, "augment.cutout": 0.05 / 5, "augment.low_resolution": 0.8 / 5,
    "augment.blur": 0.2 / 5, "augment.blur_sigma": 4.0, "augment.grayscale": round(2 / 7 * (2 / 7) ** 2, 2),
    "augment.photometric": round(1 - (1 - 3 / 7 * (1 + 2 / 7 + (2 / 7) ** 2)) ** 2, 2), "augment.photometric_strength": 0.39,
    "backbone.name": "vit_kprpe_b", "backbone.dropout": 0.0, "backbone.drop_path": 0.1,
}  # fmt: skip
OTHERS["adaface_wf12m_vit_kprpe_b"] = OTHERS["adaface_wf4m_vit_kprpe_b"] | {
    key: OTHERS["adaface_wf12m_r100"][key] for key in ("data.num_classes", "data.num_images", "eval.every")
}
# theirs that our defaults already have
SAME = {
    "optimizer.lr": 0.1, "optimizer.momentum": 0.9, "optimizer.weight_decay": 5e-4, "schedule.factor": 0.1, "loss.scale": 64.0,
    "backbone.embedding_size": 512, "head.sample_rate": 1.0, "train.accumulation": 1,
    "data.flip": True, "optimizer.name": "sgd", "optimizer.nesterov": False, "data.image_size": 112, "head.weight_decay": -1.0,
}  # fmt: skip
SHIPPED = {path.stem for path in SCHEMA.parent.glob("*.yaml")} - {"base", "demo_cpu", "small"}


def test_every_shipped_recipe_is_compared_here():
    assert {*PUBLISHED, *OTHERS} == SHIPPED
    assert f"the {len(PUBLISHED)} run files of arcface_torch" in SCHEMA.parents[1].joinpath("README.md").read_text()


def _images(name: str) -> tuple[int, int]:
    """Return (identities, images) of a recipe's training set."""
    if name == "3millions":  # an epoch there has fewer images than identities, which drawn data here cannot have
        return 300_000, 300_000
    return next(numbers for prefix, numbers in reversed(DATA.items()) if name.startswith(f"{prefix}_"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_what_the_importer_makes_of_its_source(name: str, tmp_path: Path):
    recipe = PUBLISHED[name]
    classes, images = _images(name)
    given = {
        "margin_list": recipe.margins, "network": recipe.network, "embedding_size": 512, "sample_rate": recipe.rate,
        "fp16": True, "momentum": 0.9, "weight_decay": recipe.decay, "batch_size": recipe.batch_size, "lr": recipe.lr,
        "verbose": recipe.verbose, "rec": "synthetic" if name == "3millions" else "/d", "num_classes": classes,
        "num_image": images, "num_epoch": recipe.epochs, "warmup_epoch": recipe.warmup, "val_targets": list(recipe.targets),
        "interclass_filtering_threshold": recipe.filtering, "optimizer": recipe.optimizer, "gradient_acc": recipe.accumulation,
    }  # fmt: skip
    theirs, imported = tmp_path / "theirs.py", tmp_path / "imported.yaml"
    theirs.write_text("config = edict()\n" + "".join(f"config.{key} = {value!r}\n" for key, value in given.items()))
    assert import_arcface_config.main([str(theirs), "--gpus", str(recipe.gpus), "--out", str(imported)]) == 0
    ours, other = (load_config(path, (), train.NAMED) for path in (SCHEMA.with_name(f"{name}.yaml"), imported))
    for section in ("backbone", "loss", "head", "optimizer", "schedule", "eval"):
        assert ours[section] == other[section], section
    assert {**ours.train, "precision": "fp16"} == other.train and ours.train.precision == "bf16"  # see docs/migration.md
    assert (ours.data.source, ours.data.num_classes, ours.data.num_images) == (other.data.source, classes, images)
    # the same against the table itself, so that a mistake of the importer cannot hide one of a recipe
    margin = 0.5 if recipe.margins == ARC else 0.4
    assert (ours.loss.name, ours.loss.margin, ours.loss.scale) == ({0.5: "arcface", 0.4: "cosface"}[margin], margin, 64.0)
    total = recipe.batch_size * recipe.gpus * recipe.accumulation
    assert (ours.train.batch_size, ours.train.accumulation, ours.train.epochs) == (total, recipe.accumulation, recipe.epochs)
    optimizer = (ours.optimizer.name, ours.optimizer.lr, ours.optimizer.momentum, ours.optimizer.weight_decay)
    assert optimizer == (recipe.optimizer, recipe.lr, 0.9, recipe.decay)
    rate = recipe.rate or 1e-9
    assert (ours.head.lr_factor, ours.head.weight_decay, ours.head.sample_rate) == (1.0, -1.0, rate)  # centres: as the backbone
    assert ours.head.interclass_filtering_threshold == recipe.filtering
    assert (ours.schedule.power, ours.schedule.warmup_epochs) == (2.0, max(0, recipe.warmup))
    assert (ours.eval.targets, ours.eval.every) == (recipe.targets, recipe.verbose // recipe.accumulation)
    assert ours.backbone.name == recipe.network.split("_dp")[0]


@pytest.mark.usefixtures("names_of_timm")
@pytest.mark.parametrize("name", OTHERS)
def test_a_recipe_of_another_program_has_its_values_and_no_other(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "default.yaml").write_text("")
    printed = []
    for config in (name, str(tmp_path / "default.yaml")):
        assert train.main([config, "--print-config", "run.name=same"]) == 0
        sections = yaml.safe_load(capsys.readouterr().out)
        assert sections.pop("tasks") == []
        printed.append({f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()})
    ours, default = printed
    changed = {key: value for key, value in ours.items() if key not in default or default[key] != value}
    expected = {key: value for key, value in OTHERS[name].items() if default.get(key) != value}
    assert changed == expected
    assert (SAME | OTHERS[name]).items() <= ours.items()
    text = SCHEMA.with_name(f"{name}.yaml").read_text()
    assert (
        text.startswith(f"# ./face train {name} ")
        and f": batch {ours['train.batch_size']}.\n" in text
        and "Not run here.\n" in text
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_names_its_source_and_the_batch_of_its_figures(name: str):
    recipe = PUBLISHED[name]
    batch = recipe.batch_size * recipe.gpus * recipe.accumulation
    text = SCHEMA.with_name(f"{name}.yaml").read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    gpus = f"{recipe.gpus} GPU{'s' if recipe.gpus > 1 else ''}"
    assert f"arcface_torch's configs/{name}.py with {gpus}: batch {batch}" in comments[1]
    log = f"# Its published log, batch {batch}, best of each set:"
    which = "for one machine, which states no batch|for several machines|of noisy sets|of ViTs"
    table = rf"# Its published table ({which}): IJB-C TAR \d\d\.\d\d at FAR 1e-4\."
    nothing = "# No published result of it is known."
    if name != "3millions":
        assert comments[2].startswith((log, nothing)) or re.match(table, comments[2])
        assert comments[2].endswith("Ours: not yet run.")
    assert f"{comments[0]} ".startswith(f"# ./face train {name} ")
    assert comments[0].endswith(f" --machines {recipe.gpus // 8} --head HOST") == (recipe.gpus > 8)
    differences = {key: value for key, value in yaml.safe_load(text).items() if key != "_base_"}
    assert sum(map(len, differences.values())) <= 12
