"""Inputs that name or hold many pictures: record files, verification sets, lists, landmarks and folders."""

import json
from collections.abc import Sequence
from pathlib import Path

from .fuzz_files import Case, Entry, Fifo, Folder, Link
from .fuzz_grammar import TEXTS, Rng, change_tree, damage, evil_pickle, pick
from .fuzz_inputs import HERE, Input, Maker, Sound
from .fuzz_seeds import CONFIG, FIXTURES, encoded, files_below

_CHECK = ["train", "tiny.yaml", "--check"]
_ANY = ["data.num_classes=0", "data.num_images=0"]  # whatever the data has
_NAMES = (
    "a b", "\udcff\udcfe", "\x1b[2J", "new\nline", "..", ".hidden", "x" * 200, "a,b", "\u00e9", "-flag", "%s", "con\t1",
    "\u202e",
)  # fmt: skip


def inputs(seeds: Path) -> dict[str, Input]:
    """Return the inputs by name, from the seeds of fuzz_seeds.make_seeds."""
    config: Sound = {"tiny.yaml": CONFIG.encode()}
    people: Sound = {f"people/{name}": data for name, data in files_below(seeds / "people").items()}
    folk: Sound = {f"people/{n:02}/{m}.jpg": encoded(n % 3 + m) for n in range(20) for m in range(2)}
    records = [_record_files(path) for path in sorted(FIXTURES.rglob("*.rec"))]
    records.append({name: data for name, data in files_below(seeds / "set").items() if name in _RECORD_FILES})
    bins = [path.read_bytes() for path in sorted((FIXTURES / "bin").rglob("*.bin"))]
    pairs = files_below(seeds / "pairs")
    return {
        "records": Input({}, [_mutated(records, f"{HERE}:records", ["."])]),
        "records-program": Input(dict(config), [_mutated(records, *_SET_PROGRAMS)], 300, 20),
        "bin": Input({}, [_bin_maker(bins), lambda sound, rng: _one(f"{HERE}:pairs", "set.bin", evil_pickle(rng))]),
        "pairs-folder": Input({**config, **folk}, [_list_of_pairs, _people_pairs], 300, 20),
        "pairs-safetensors": Input({}, [_tensor_pairs(pairs["tiny.safetensors"])]),
        "folder": Input({**config, **people}, [_folder_tree], 600, 10),
        "list": Input({**config, **people}, [_list_file, _lst_file], 256, 20),
        "landmarks": Input({**people}, [_landmarks], 600, 20),
    }


_RECORD_FILES = ("train.rec", "train.idx", "property")
_SET_PROGRAMS = (
    "train",
    ["tiny.yaml", "--check", "data.num_classes=0", "data.num_images=0", "data.source=recordio", "data.path=."],
    "scripts.data.verify",
    ["."],
)


def _record_files(path: Path) -> dict[str, bytes]:
    files = {"train.rec": path.read_bytes()}
    for source, name in ((path.with_suffix(".idx"), "train.idx"), (path.with_name("property"), "property")):
        if source.is_file():
            files[name] = source.read_bytes()
    return files


def _one(program: str, name: str, data: bytes) -> Case:
    return Case([program, name], {name: data})


def _mutated(seeds: Sequence[dict[str, bytes]], *commands: str | list[str]) -> Maker:
    """Return a maker that damages one file of a record set, or two, or leaves the index out."""
    others = [data for seed in seeds for data in seed.values()]
    choices = list(zip(commands[::2], commands[1::2], strict=True))

    def make(sound: Sound, rng: Rng) -> Case:
        files: dict[str, Entry] = dict(pick(rng, seeds))
        if "train.idx" in files and rng.random() < 0.1:
            del files["train.idx"]
        for name in sorted(set(rng.choice(sorted(files), int(rng.integers(1, 3))).tolist())):
            files[name] = damage(files[name] or b"", others, rng)  # type: ignore[arg-type]
        program, words = pick(rng, choices)
        return Case([program, *words], files)

    return make


def _bin_maker(bins: Sequence[bytes]) -> Maker:
    return lambda sound, rng: _one(f"{HERE}:pairs", "set.bin", damage(pick(rng, bins), bins, rng))


# ---- lists of pairs, of pictures, of landmarks


_ODD = ("../canary", "/dev/zero", "/dev/stdin", "pipe", "people", "", "nowhere.jpg", "/proc/self/mem", "/proc/self/environ")


def _word(rng: Rng, names: Sequence[str], share: float) -> str:
    """Return a name for a list: a picture's name, or with probability `share` an odd one."""
    return str(pick(rng, names) if rng.random() >= share else pick(rng, (*_ODD, *TEXTS, *_NAMES)))


def _share(rng: Rng) -> float:
    """Return the share of wrong entries in a list: some lists have only one, so that everything else is read."""
    return float(pick(rng, (0.0, 0.03, 0.3)))


def _text(lines: Sequence[str], rng: Rng, share: float) -> bytes:
    """Return lines as a file, in one of several encodings, sometimes damaged."""
    text = pick(rng, ("\n", "\n", "\n", "\r\n", "\r")).join(lines)
    if "\ud800" in text:
        data = b"\xed\xa0\x80" + text.encode("utf-8", "replace")
    else:
        data = text.encode("utf-8", "surrogateescape")
        if rng.random() < share:
            data = text.encode(pick(rng, ("utf-8-sig", "latin-1", "utf-16")), "replace")
    return damage(data, [data], rng) if rng.random() < 2 * share else data


def _pictures(sound: Sound) -> list[str]:
    return [name for name in sound if name.startswith("people/")]


def _list_of_pairs(sound: Sound, rng: Rng) -> Case:
    share, names, mark = _share(rng), _pictures(sound), pick(rng, (",", ",", "\t", " "))
    flags = ("0", "1", "true", "False", "1", "2", "-1", "", "1e9", "same", "\u0661")
    rows = [
        mark.join(
            (_word(rng, names, share), _word(rng, names, share), str(pick(rng, flags if rng.random() < share else flags[:4])))
        )
        for _ in range(int(rng.integers(12)))
    ]
    files: dict[str, Entry] = {"list.csv": _text(rows, rng, share), "pipe": Fifo()}
    command = pick(
        rng, ([*_CHECK, "eval.path=.", "eval.targets=[list.csv]"], ["scripts.data.convert_bin", "list.csv", "--out", "new"])
    )
    command = pick(
        rng, (command, ["scripts.data.pairs_to_bin", "csv", ".", "list.csv", "new.bin"], [f"{HERE}:pairs", "list.csv"])
    )
    return Case(list(command), files)


def _people_pairs(sound: Sound, rng: Rng) -> Case:
    case = _folder_tree(sound, rng)
    choices = (
        [*_CHECK, "eval.path=.", "eval.targets=[people]"],
        ["scripts.data.pairs_to_bin", "sample", "people", "new.bin", "--pairs", "20"],
    )
    return Case(list(pick(rng, choices)), case.files)


def _tensor_pairs(seed: bytes) -> Maker:
    def make(sound: Sound, rng: Rng) -> Case:
        data = changed_header(seed, rng) if rng.random() < 0.6 else damage(seed, [seed], rng)
        return Case([f"{HERE}:pairs", "set.safetensors"], {"set.safetensors": data})

    return make


def changed_header(data: bytes, rng: Rng) -> bytes:
    """Return a .safetensors file with a wrong header, or with a wrong header length."""
    length = int.from_bytes(data[:8], "little")
    tree = change_tree(json.loads(data[8 : 8 + length]), rng)
    text = json.dumps(tree).encode()
    if rng.random() < 0.15:
        text = pick(rng, (b"", b"null", b"[]", b"{" * 5000, text[:-1], text + b"x", b'{"a":' * 900 + b"1" + b"}" * 900))
    size = len(text) if rng.random() < 0.85 else int(pick(rng, (0, 1, 2**32, 2**63, 2**64 - 1, len(data), len(text) - 1)))
    return max(0, size).to_bytes(8, "little") + text + data[8 + length :]


def _list_file(sound: Sound, rng: Rng) -> Case:
    names, share = _pictures(sound), _share(rng)
    labels = ("0", "1", "2", "-1", "99999999", "100000000", "1.5", "", "\u0661", "1e3", "010", "9" * 5000)
    rows = [
        _word(rng, names, share) + pick(rng, (" ", "\t", "  ")) + pick(rng, labels if rng.random() < share else labels[:3])
        for _ in range(8)
    ]
    files: dict[str, Entry] = {"list.txt": _text(rows, rng, share), "pipe": Fifo()}
    reader = ([*_CHECK, *_ANY, "data.source=list", "data.path=list.txt"], [f"{HERE}:images_of_set", "list.txt"])
    return Case(list(pick(rng, reader)), files)


def _lst_file(sound: Sound, rng: Rng) -> Case:
    names, share = _pictures(sound), _share(rng)
    numbers = ("0", "1", "2", "-1", "nan", "inf", "1e400", "1.5", "", "9" * 400, "x", "\u0661")
    rows = []
    for number in range(int(rng.integers(1, 8))):
        word = _word(rng, names, share)
        label = pick(rng, numbers if rng.random() < share else numbers[:1])
        points = [40, 72, 56, 44, 68, 50, 50, 70, 86, 86]
        if rng.random() < share:
            points = [pick(rng, ("40", "60.5", "nan", "inf", "1e300", "-5")) for _ in range(int(rng.integers(9, 12)))]
        forms = ([str(number), label, word], ["1", word, label], ["0", word, label, "0", "0", "9", "9", *map(str, points)])
        rows.append("\t".join(pick(rng, forms)))
    return Case(
        ["scripts.data.folder_to_rec", "list.lst", "out", "--threads", "1"],
        {"list.lst": _text(rows, rng, share), "pipe": Fifo()},
    )


def _landmarks(sound: Sound, rng: Rng) -> Case:
    names, share = [name.removeprefix("people/") for name in _pictures(sound)], _share(rng)
    good = [40, 50, 72, 50, 56, 70, 44, 86, 68, 86]
    odd = ("nan", "inf", "-inf", "1e308", "1e-308", "10000", "-10000", "0", "1e9", "", "x", "\u0661", "0x10", "1_0")
    rows = (
        []
        if rng.random() < 0.7
        else [pick(rng, ("name,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5", "name,a_x,a_y,b_x,b_y", "a,b", "x1,x2,x3,x4,x5,y1,y2,y3,y4,y5"))]
    )
    same = rng.random() < share
    for name in names[: len(names) if rng.random() >= share else 4]:
        numbers = [str(40 if same else number + int(rng.integers(-9, 9))) for number in good]
        if rng.random() < share:
            numbers[int(rng.integers(10))] = str(pick(rng, odd))
        rows.append(",".join([_word(rng, [name], share / 4), *numbers[: 10 if rng.random() >= share / 4 else 7]]))
    data = _text(rows, rng, share)
    words = ["people", "points.csv", "out", "--threads", "1", *pick(rng, ([], ["--png"], ["--size", "8"], ["--plain-warp"]))]
    program = ["scripts.data.align", *words]
    if rng.random() < 0.3:
        program = ["scripts.data.folder_to_rec", "people", "out", "--landmarks", "points.csv", "--threads", "1"]
    return Case(program, {"points.csv": data})


# ---- folders


def _folder_tree(sound: Sound, rng: Rng) -> Case:
    """Return a case with a folder of people that contains links, pipes, odd names and empty folders."""
    files: dict[str, Entry] = {}
    targets = (
        ".", "..", "../p1", "/", "/dev/zero", "/dev", "loop", "../../canary", "/proc/self/fd", "nowhere", "p0", "/proc/self",
    )  # fmt: skip
    first = sorted({name.split("/")[1] for name in _pictures(sound)})
    spots = ("people", f"people/{first[0]}", f"people/{first[1]}", "people/new", "people/new/deep")
    for _ in range(int(rng.integers(1, 7))):
        name = str(pick(rng, ("loop", "x.jpg", "y.png", "z.JPG", *_NAMES[:-1])))
        if name == "..":
            continue
        if rng.random() < 0.3:
            name += ".jpg"
        if not name.isascii() and rng.random() < 0.5:
            name = "plain.jpg"
        entries: tuple[Entry, ...] = (Link(str(pick(rng, targets))), Fifo(), Folder(), b"", b"no image", encoded(9))
        path = f"{pick(rng, spots)}/{name}"
        if not any(path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in files):
            files[path] = pick(rng, entries)
    if rng.random() < 0.1:
        files["people/" + "d/" * int(rng.integers(20, 60)) + "a.jpg"] = encoded(3)
    commands = (
        [*_CHECK, *_ANY, "data.source=folder", "data.path=people"],
        [f"{HERE}:images_of_set", "people"],
        ["scripts.data.verify", "people"],
        ["scripts.data.folder_to_rec", "people", "out", "--threads", "1"],
        ["scripts.data.folder_to_rec", "people", "out", "--threads", "1", "--skip-bad", "--resize"],
    )
    return Case(list(pick(rng, commands)), files)
