from pathlib import Path

import pytest
import yaml

from configs import as_plain, dump_config, load_config
from configs.loader import SCHEMA

CONFIGS = sorted(path for path in SCHEMA.parent.glob("*.yaml") if path != SCHEMA)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_its_dump_reads_back_the_same(path: Path, tmp_path: Path):
    config = load_config(path)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert as_plain(load_config(tmp_path / "again.yaml")) == as_plain(config)
    assert config.run.name == path.stem


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_says_its_command_and_only_what_differs(path: Path):
    text = path.read_text()
    assert f"train.py configs/{path.name}" in text.splitlines()[0]
    below = load_config(SCHEMA) if "_base_" not in text else load_config(path.parent / yaml.safe_load(text)["_base_"])
    own = {k: v for k, v in yaml.load(text, yaml.SafeLoader).items() if k != "_base_"}
    config = load_config(path)
    for section, keys in own.items():
        for key in keys:
            assert config[section][key] != below[section][key], f"{section}.{key} repeats the value below it"


def _load(tmp_path: Path, text: str, *overrides: str):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_exponents_without_a_point_are_numbers(tmp_path: Path):
    config = _load(tmp_path, "optimizer: {weight_decay: 5e-4, lr: 1E-1}\n", "schedule.power=2e0")
    assert (config.optimizer.weight_decay, config.optimizer.lr, config.schedule.power) == (5e-4, 0.1, 2.0)


def test_overrides_win_over_the_file_and_the_file_over_its_base(tmp_path: Path):
    (tmp_path / "below.yaml").write_text("train: {epochs: 3, batch_size: 64}\nloss: {margin: 0.3}\n")
    config = _load(tmp_path, "_base_: below.yaml\ntrain: {epochs: 4}\n", "loss.margin=0.2", "eval.targets=[lfw]")
    assert (config.train.epochs, config.train.batch_size, config.loss.margin) == (4.0, 64, 0.2)
    assert config.eval.targets == ("lfw",)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("trian: {epochs: 3}\n", [], r"no key 'trian'. Did you mean train\?"),
        ("train: {epoch: 3}\n", [], r"no key 'train.epoch'. Did you mean train.epochs\?"),
        ("lr: 0.1\n", [], r"Did you mean optimizer.lr\?"),
        ("train: {batch_size: many}\n", [], "train.batch_size must be a whole number, got 'many'"),
        ("train: {batch_size: 1.5}\n", [], "train.batch_size must be a whole number, got 1.5"),
        ("train: {batch_size: true}\n", [], "train.batch_size must be a whole number, got True"),
        ("data: {flip: 1}\n", [], "data.flip must be true or false, got 1"),
        ("optimizer: {lr: .nan}\n", [], "optimizer.lr must be a number"),
        ("eval: {targets: lfw}\n", [], "eval.targets must be a list of names, got 'lfw'"),
        ("train: 3\n", [], "train is a section"),
        ("- train\n", [], "must hold sections"),
        ("train: {epochs: [\n", [], "not valid YAML"),
        ("train: {epochs: 1, epochs: 2}\n", [], "key 'epochs' stands twice"),
        ("_base_: run.yaml\n", [], "circle"),
        ("_base_: nowhere.yaml\n", [], "cannot be read"),
        ("", ["train.epochs"], "must read section.key=value"),
        ("", ["train.precision=fp61"], r"one of fp32, bf16, fp16, got 'fp61'. Did you mean fp16\?"),
        ("", ["head.sample_rate=1.5"], "head.sample_rate must be from 0 to 1"),
        ("", ["head.sample_rate=0"], "head.sample_rate must be above 0"),
        ("", ["optimizer.lr=-1"], "optimizer.lr must be at least 0"),
        ("", ["train.accumulation=3"], "multiple of train.accumulation"),
        ("", ["schedule.warmup_epochs=30"], "schedule.warmup_epochs must be below train.epochs"),
        ("", ["data.source=synthetic"], "data.num_classes must be at least 1"),
        ("", ["eval.targets=[lfw, lfw]"], "names a set twice"),
    ],
)
def test_a_mistake_is_one_error_that_names_it(tmp_path: Path, text: str, overrides: list[str], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        _load(tmp_path, text, *overrides)
    assert "\n" not in str(caught.value)


def test_a_missing_config_names_the_nearest_file():
    with pytest.raises(ValueError, match=r"Did you mean .*ms1mv2_r50.yaml"):
        load_config(SCHEMA.with_name("ms1mv2_r5O.yaml"))


def test_a_loaded_config_cannot_be_changed(tmp_path: Path):
    config = _load(tmp_path, "")
    for change in (
        lambda: setattr(config.train, "epochs", 3),
        lambda: config.train.__setitem__("epochs", 3),
        lambda: config.update(train={}),
        lambda: config.train.pop("epochs"),
        lambda: delattr(config, "train"),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
    assert config.train.epochs == 20.0
