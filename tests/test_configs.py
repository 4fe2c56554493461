import functools
import re
from pathlib import Path

import pytest
import yaml

import losses
import train
from backbones import backbone_arguments, list_backbones
from configs import as_plain, dump_config
from configs import load_config as load_any_config
from configs.loader import SCHEMA
from losses import MARGINS, margin_arguments
from utils.text import nearest

load_config = functools.partial(load_any_config, named=train.NAMED)
CONFIGS = sorted(path for path in SCHEMA.parent.glob("*.yaml") if path != SCHEMA)
TAKEN = "loss.name=arcface takes scale, margin, gradient"


@pytest.mark.usefixtures("names_of_timm")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_its_dump_reads_back_the_same(path: Path, tmp_path: Path):
    config = load_config(path)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert as_plain(load_config(tmp_path / "again.yaml")) == as_plain(config)
    assert config.run.name == path.stem


@pytest.mark.usefixtures("names_of_timm")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_says_its_command_and_only_what_differs(path: Path):
    text = path.read_text()
    assert f"./face train {path.stem} " in f"{text.splitlines()[0]} "
    below = load_config(SCHEMA) if "_base_" not in text else load_config(path.parent / yaml.safe_load(text)["_base_"])
    own = {k: v for k, v in yaml.load(text, yaml.SafeLoader).items() if k != "_base_"}
    config = load_config(path)
    for section, keys in own.items():
        for key in keys:
            assert config[section][key] != below[section].get(key), f"{section}.{key} repeats the value below it"


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
        ("head: {state: lean}\n", [], r"head.state is now head.storage"),
        ("train: {batch_size: many}\n", [], "train.batch_size must be a whole number, got 'many'"),
        ("train: {batch_size: 1.5}\n", [], "train.batch_size must be a whole number, got 1.5"),
        ("train: {batch_size: true}\n", [], "train.batch_size must be a whole number, got true"),
        ("data: {flip: 1}\n", [], "data.flip must be true or false, got 1"),
        ("optimizer: {lr: .nan}\n", [], "optimizer.lr must be a number"),
        ("eval: {targets: lfw}\n", [], "eval.targets must be a list of names, got 'lfw'"),
        ("train: 3\n", [], "train is a section"),
        ("- train\n", [], "must hold sections"),
        ("train: {epochs: [\n", [], "not valid YAML"),
        ("train: {epochs: 1, epochs: 2}\n", [], "key 'epochs' is given twice"),
        ("_base_: run.yaml\n", [], "form a cycle"),
        ("_base_: nowhere.yaml\n", [], "cannot be read"),
        ("", ["train.epochs"], "must read section.key=value"),
        ("", ["train.precision=fp61"], r"one of fp32, bf16, fp16, auto, got 'fp61'. Did you mean fp16\?"),
        ("", ["head.sample_rate=1.5"], "head.sample_rate must be from 0 to 1"),
        ("", ["head.sample_rate=0"], "head.sample_rate must be above 0"),
        ("", ["optimizer.lr=-1"], "optimizer.lr must be at least 0"),
        ("", ["train.accumulation=3"], "multiple of train.accumulation"),
        ("", ["schedule.warmup_epochs=30"], "schedule.warmup_epochs must be below train.epochs"),
        ("", ["data.source=records"], "data.source must be one of recordio, folder, list, tar, synthetic, got 'records'"),
        ("", ["data.shuffle=sorted"], "data.shuffle must be one of full, block, got 'sorted'"),
        ("", ["data.block=0"], "data.block must be at least 1"),
        ("", ["train.max_steps=100000000"], "train.max_steps must be from 0 to 99999999, got 100000000"),
        ("", ["loss.focal=-1"], "loss.focal must be from 0 to 10, got -1.0"),
        ("", ["loss.label_smoothing=1.0"], "loss.label_smoothing must be from 0 to 0.999, got 1.0"),
        ("", ["data.max_bad_fraction=1"], "data.max_bad_fraction must be from 0 to 0.999"),
        ("", ["data.source=synthetic"], "data.num_classes must be at least 1"),
        ("", ["eval.targets=[lfw, lfw]"], "names a set twice"),
        ("", ["run.name=../foo"], r"run.name must be the name of one folder.*got '../foo'. For another place set run.output"),
        ("", ["run.name=."], "run.name must be the name of one folder"),
        ("", ["run.name=.."], "run.name must be the name of one folder"),
        ("", [f"run.name={'n' * 201}"], "at most 200 bytes"),
        ('run: {name: "a\\0b"}\n', [], "run.name must be one line of text without control characters"),
        ('data: {path: "a\\nb"}\n', [], "data.path must be one line of text without control characters"),
        ("", ["train.batch_size=010"], "a whole number, got 010; write it without the leading zero"),
        ("", ["train.batch_size=1:30"], "a whole number, got 1:30"),
        ("", ["train.batch_size=0x10"], "a whole number, got 0x10"),
        ("", ["train.batch_size='8'"], "a whole number, got '8'"),
        ("", ["train.batch_size="], "a whole number, got nothing"),
        ("", ["train.epochs=010"], "a number, got 010; write it without the leading zero"),
        *(("", [f"train.epochs={word}"], f"train.epochs must be a number, got {word}") for word in ("1_", "1__0")),
        ("", ["train.batch_size=1_"], "train.batch_size must be a whole number, got 1_"),
        ("", ["optimizer.lr=00.1"], "a number, got 00.1; write it without the leading zero"),
        ("", ["optimizer.lr=off"], "a number, got off"),
        ("", ["data.flip=maybe"], "data.flip must be true or false, got 'maybe'"),
        ("", ["data.flip='no'"], "data.flip must be true or false, got 'no'"),
        ("", ["run.name=null"], """run.name must be text, got null; write '' for nothing, or '"null"' for the word itself"""),
        ("data: {path: ~}\n", [], "data.path must be text, got ~; write '' for nothing"),
        ("", ["run.name=a: b"], "run.name must be text, got .*in quotes"),
        ("", ["run.name=run #5"], "# begins a comment"),
        ("", ["run.name=#5"], "# begins a comment"),
        ("", ["data.path=s\udcf6t"], "the value has characters that are no text; rename the file"),
        ("", ["eval.targets="], r"eval.targets must be a list of names, got nothing; write \[\] for none"),
        ("", ["eval.targets=[lfw, null]"], "a name is empty or null"),
        ("", ["data.index_cache=on"], "data.index_cache must be auto, off or a folder, got on.*write ./on"),
        ("train:\n", [], "train is a section, got nothing"),
    ],
)
def test_a_mistake_is_one_error_that_names_it(tmp_path: Path, text: str, overrides: list[str], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        _load(tmp_path, text, *overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["off", "no", "false", "Off", "'off'"])
def test_the_index_cache_is_switched_off_as_documented_in_files_and_overrides(tmp_path: Path, word: str):
    assert _load(tmp_path, f"data: {{index_cache: {word}}}\n").data.index_cache == "off"
    assert _load(tmp_path, "", f"data.index_cache={word}").data.index_cache == "off"


@pytest.mark.parametrize(
    "word", ["001", "010", "12:30", "2024-05-01", "1e3", "0x10", "off", "yes", "1_000", "=", "1.0", ".5", "'null'", "-3"]
)
def test_a_text_key_takes_a_word_as_it_was_written(tmp_path: Path, word: str):
    expected = word.strip("'")
    config = _load(tmp_path, f"run: {{name: {word}}}\n")
    assert config.run.name == expected == _load(tmp_path, "", f"run.name={word}").run.name
    assert type(config.run.name) is str
    assert _load(tmp_path, "", f"eval.targets=[{word}, b]").eval.targets == (expected, "b")
    (tmp_path / "dump.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dump.yaml").run.name == expected


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("on", True), ("TRUE", True), ("no", False), ("off", False)])
def test_a_switch_takes_the_words_of_yaml(tmp_path: Path, word: str, value: bool):
    assert _load(tmp_path, f"data: {{flip: {word}}}\n", f"eval.at_end={word}").data.flip is value
    assert _load(tmp_path, "", f"data.flip={word}").data.flip is value


@pytest.mark.parametrize(
    ("word", "value"), [("3", 3.0), ("+.5", 0.5), ("1.", 1.0), ("2E-3", 2e-3), ("1_0.5", 10.5), ("!!float 3", 3.0), ("0", 0.0)]
)
def test_a_number_is_read_as_decimal(tmp_path: Path, word: str, value: float):
    assert _load(tmp_path, f"optimizer: {{lr: {word}}}\n").optimizer.lr == value


def test_an_empty_value_of_a_text_key_is_no_text(tmp_path: Path):
    (tmp_path / "below.yaml").write_text("data: {path: /a}\n")
    assert _load(tmp_path, "_base_: below.yaml\ndata:\n  path:\n").data.path == ""
    assert _load(tmp_path, "_base_: below.yaml\n", "data.path=").data.path == ""


def test_anchors_and_merges_of_yaml_work(tmp_path: Path):
    assert _load(tmp_path, "train: &t {epochs: 3}\nschedule: {power: 1}\n").train.epochs == 3
    (tmp_path / "merge.yaml").write_text("data: {sources: [&a {path: x, repeat: 2}, {<<: *a, path: y}]}\n")
    assert load_config(tmp_path / "merge.yaml").data.sources[1].repeat == 2.0


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("arcfac", ["arcface", "cosface"], "arcface"), ("ArcFace", ["arcface", "cosface"], "arcface"),
        ("r101", ["r50", "r100"], "r100"), ("fp61", ["fp32", "fp16"], "fp16"), ("trian", ["train", "eval"], "train"),
        ("sampling_rate", ["sample_rate", "sampling"], "sample_rate"), ("vit_b", ["r50", "mbf"], None),
        ("adaface", ["arcface", "cosface", "combined"], None), ("lamb", ["sgd", "adamw"], None),
        ("int8", ["fp32", "bf16", "fp16"], None), ("", ["r50"], None),
    ],
)  # fmt: skip
def test_a_slip_has_a_suggestion_and_a_far_word_has_none(name: str, known: list[str], expected: str | None):
    assert nearest(name, known) == expected


def test_every_key_is_explained_where_it_stands():
    section = ""
    for number, line in enumerate(SCHEMA.read_text().splitlines(), 1):
        section = line.split(":")[0] if line and line[0] not in " #" else section
        key = line.split("#")[0].strip()
        if line.startswith("  ") and key:
            name = f"{section}.{key.split(':')[0]}"
            assert len(line.partition("#")[2].split()) >= 3, f"line {number}: {name} has no explanation"


def test_the_page_about_configuration_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = (SCHEMA.parent.parent / "docs" / "configuration.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "ms1mv3_r50.yaml").write_text(SCHEMA.with_name("ms1mv3_r50.yaml").read_text())
    (folder / "mine.yaml").write_text(example)
    arguments = re.search(r"^\./face train configs/mine.yaml (.*) --print-config$", page, re.M).group(1).split()
    assert train.main([str(folder / "mine.yaml"), *arguments, "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    expected = as_plain(load_config(SCHEMA))
    for name, value in {
        "data.num_classes": 93431, "data.num_images": 5179510, "train.precision": "bf16",  # the file below
        "backbone.name": "r100", "optimizer.lr": 0.05, "eval.targets": ["lfw"],  # the file
        "train.epochs": 2.0, "run.name": "short",  # the command line
    }.items():  # fmt: skip
        section, key = name.split(".")
        expected[section][key] = value
    assert printed == expected
    examples = re.findall(r"`'?([a-z]+\.[a-z_]+=[^`]*?)'?`", page.split("## Values")[1].split("## What is checked")[0])
    for override in examples:
        load_config(SCHEMA, [override.replace("='\"", '="').replace("\"'", '"')])
    assert len(examples) >= 9
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(printed))  # config.yaml of a run folder is a config
    assert as_plain(load_config(tmp_path / "again.yaml")) == printed


def test_the_keys_on_the_pages_exist_and_have_the_defaults_that_are_said_there():
    base = yaml.safe_load(SCHEMA.read_text())
    keys = {f"{section}.{key}": value for section in base for key, value in dict(base[section] or {}).items()}
    known = {f"loss.{key}" for name in MARGINS for key in margin_arguments(name)} | keys.keys()
    known |= {f"backbone.{key}" for name in list_backbones() for key in backbone_arguments(name)}
    said: list[tuple[str, str]] = []
    for page in (SCHEMA.parents[1] / "README.md", *(SCHEMA.parents[1] / "docs").glob("*.md")):
        text = page.read_text()
        named = set(re.findall(rf"\b(?:{'|'.join(base)})\.(?!(?:py|md|rec|idx|lst|log|pth|safetensors)\b)[a-z_]+\b", text))
        assert named <= known, (page.name, named - known)
        said += re.findall(r"`(\w+\.\w+)` \((?:default )?([\d.]+)\b", text)
        strengths = [(f"augment.{key}", value) for key, value in re.findall(r"`(\w+_\w+)` ([\d.]+)\b", text)]
        said += [one for one in strengths if one[0] in keys]
        table = text.partition("| key | default |")[2].partition("\n\n")[0]
        for first, values in re.findall(r"^\| `(.*?)` \| (.*?) \|", table, re.M):
            section, names = first.split(".", 1)
            said += zip((f"{section}.{name}" for name in names.split("`, `")), values.split(", "), strict=True)
    assert len(said) > 20 and [(name, keys[name]) for name, _ in said] == [(name, yaml.safe_load(text)) for name, text in said]


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", [], {"name": "arcface", "scale": 64.0, "margin": 0.5, "gradient": "exact"}),
        ("loss: {name: cosface}", [], {"name": "cosface", "scale": 64.0, "margin": 0.4, "gradient": "exact"}),
        ("loss: {margin: 0.2, scale: 32}", ["loss.name=cosface"], {"name": "cosface", "scale": 32.0, "margin": 0.2}),
        ("loss: {margin: 0.2}", ["loss.m3=0.1", "loss.name=combined"], {"name": "combined", "m1": 1.0, "m2": 0.3, "m3": 0.1}),
        ("loss: {name: combined, m2: 0.1}", ["loss.name=arcface"], {"name": "arcface", "margin": 0.5}),
        ("loss: {name: combined, m2: 0.1}", ["loss.m1=1.1"], {"name": "combined", "m1": 1.1, "m2": 0.1, "m3": 0.2}),
    ],
)
def test_a_loss_has_the_arguments_of_its_class(tmp_path: Path, text: str, overrides: list[str], expected: dict[str, object]):
    loss = _load(tmp_path, text, *overrides).loss
    assert {key: loss[key] for key in expected} == expected
    assert set(loss) == {"name", "focal", "label_smoothing", "entropy_weights", "topology", *margin_arguments(loss.name)}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loss.marginn=0.2", f"no key 'loss.marginn'. Did you mean loss.margin? {TAKEN}"),
        ("loss.m1=2", f"no key 'loss.m1'. {TAKEN}"),
        ("loss.name=arcfase", f"loss.name must be one of {', '.join(list(MARGINS))}, got 'arcfase'. Did you mean arcface?"),
        ("loss.margin=wide", "loss.margin must be a number, got 'wide'"),
        ("loss.margin=28.6", "loss.margin must be in [0, pi / 2] for arcface (radians, not degrees), got 28.6"),
        ("loss.gradient=none", "loss.gradient must be one of exact, straight_through, got 'none'"),
        ("backbone.dept=3", "no key 'backbone.dept'. backbone.name=r50 takes embedding_size, width, dropout"),
        ("backbone.width=0", "backbone.width must be a number above 0"),
        ("backbone.embedding_size=2.5", "backbone.embedding_size must be a whole number, got 2.5"),
        ("backbone.name=edgenext", f"backbone.name must be one of {', '.join(list_backbones())}, got 'edgenext'."),
    ],
)
def test_an_argument_that_its_class_does_not_take_is_one_line(tmp_path: Path, override: str, words: str):
    with pytest.raises(ValueError) as found:
        _load(tmp_path, "", override)
    assert words in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loss: {margn: 0.3}", "run.yaml: no key 'loss.margn'. Did you mean loss.margin? loss.name=arcface takes"),
        ("loss: {margin: abc}", "run.yaml: loss.margin must be a number, got 'abc'"),
        ("loss: {name: cosface, m1: 2}", "run.yaml: no key 'loss.m1'. loss.name=cosface takes"),
    ],
)
@pytest.mark.parametrize("override", ["loss.name=arcface", "loss.name=combined"])
def test_a_mistake_in_a_file_is_found_whatever_class_is_picked_above_it(tmp_path: Path, text: str, words: str, override: str):
    if "m1" in text and override.endswith("combined"):
        pytest.skip("combined takes m1, so it stays")
    with pytest.raises(ValueError) as found:
        _load(tmp_path, text, override)
    assert words in str(found.value)


def test_an_argument_without_its_section_is_found_in_it(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no key 'margin'\. Did you mean loss\.margin\?"):
        _load(tmp_path, "", "margin=0.3")


def test_a_new_loss_is_a_class_with_arguments_and_no_key_of_base_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Leaning(losses.Margin):
        def __init__(self, scale: float = 16.0, lean: float = 0.25, steps: int = 3, shy: bool = False) -> None:
            super().__init__(scale)
            if lean < 0:
                raise ValueError(f"lean must be 0 or more, got {lean}")

    monkeypatch.setitem(losses.MARGINS, "leaning", Leaning)
    loss = _load(tmp_path, "loss: {name: leaning, steps: 5}", "loss.shy=on").loss
    of_every_loss = {"focal": 0.0, "label_smoothing": 0.0, "entropy_weights": False, "topology": 0.0}
    assert dict(loss) == {"name": "leaning", "scale": 16.0, "lean": 0.25, "steps": 5, "shy": True} | of_every_loss
    with pytest.raises(ValueError, match=r"loss\.steps must be a whole number, got 0\.5"):
        _load(tmp_path, "loss: {name: leaning}", "loss.steps=0.5")
    with pytest.raises(ValueError, match=r"loss\.lean must be 0 or more, got -1\.0"):
        _load(tmp_path, "loss: {name: leaning}", "loss.lean=-1")


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
