"""Writes a model card: what the network, its checkpoint, its results and a person say, in this order."""

import argparse
import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from backbones import build_backbone
from configs.values import is_nothing, read_yaml
from eval.foreign_networks import ForeignNetwork, InputContract
from eval.networks import Network, OtherInput, load_network
from eval.report import POINT_COLUMNS, percent, point_rows, range_text
from utils.alignment import POINTS, TEMPLATE
from utils.checkpoint.format import is_checkpoint, read_manifest
from utils.distributed.agreement import digest, digest_tensors
from utils.files import MAX_SMALL_TEXT, NewFile, read_bytes, read_text, reading, shown, write_file
from utils.image import IMAGE_SIZE
from utils.memory import forward_operations
from utils.text import did_you_mean, markdown_table, markdown_text, one_line

from ..results import SetResult, read_results_of, results_file
from .facts import Facts, backbone_words, data_facts, recipe_facts

_MARK = "<!-- written by python -m scripts.deploy.card; hash of the text above: {} -->"  # in the cards that exist
_MARKED = re.compile(_MARK.format("([0-9a-f]{32})"))


class Document:
    """Collects the parts from top to bottom. All text is shown literally, whatever markup it contains, but for `metadata`."""

    def __init__(self, title: str, metadata: str = "") -> None:
        self._markdown = [metadata] * bool(metadata) + [f"# {markdown_text(title)}"]
        self._pictures: dict[str, bytes] = {}

    def section(self, heading: str) -> None:
        """Begin a section."""
        self._markdown.append(f"## {markdown_text(heading)}")

    def text(self, text: str) -> None:
        """Add paragraphs; an empty line parts them, other line ends do not count."""
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            self._markdown.append(markdown_text(" ".join(paragraph.split())))

    def missing(self, text: str) -> None:
        """Add the place of a text that somebody must write; `text` says what it is to say."""
        self._markdown.append(f"**To be filled in:** *{markdown_text(text)}*")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table."""
        texts = ([f"{cell:,}" if type(cell) is int else cell for cell in row] for row in rows)
        self._markdown.append(markdown_table([head, *texts]))

    def picture(self, name: str, png: bytes, words: str) -> None:
        """Add a PNG, which the document has beside it as `name`."""
        self._markdown.append(f"![{markdown_text(words)}]({name})")
        self._pictures[name] = png

    def write(self, path: Path) -> None:
        """Write the pictures, then the document, each of which appears when it is complete.

        Raises:
            ValueError: a person changed the document, and would lose the changes.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_own(path)
        for name, png in self._pictures.items():
            write_file(path.with_name(name), png)
        data = ("\n\n".join(self._markdown) + "\n").encode("utf-8", "backslashreplace")
        write_file(path, data + f"{_MARK.format(digest([data]))}\n".encode())


def _require_own(path: Path) -> None:
    """Raise ValueError if a file exists that this class did not write, or that somebody changed since."""
    if not os.path.lexists(path):
        return
    try:
        text = read_text(path, MAX_SMALL_TEXT, "utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    body, _, last = text.removesuffix("\n").rpartition("\n")
    found = _MARKED.fullmatch(last)
    if not found or digest([f"{body}\n".encode()]) != found[1]:
        raise ValueError(
            f"{shown(path)} was changed by hand, or is no card of this program, and would be lost. Move your text into the "
            "file of the fields (card.yaml), and rename this one; or give another folder with --out"
        )


# texts of the card: their headings, and what they are to say
FIELDS = {
    "intended_use": ("Intended use", "what the network is meant for, by whom, and with which people's consent"),
    "not_for": ("Not meant for", "uses that you rule out, such as decisions about people that no person checks"),
    "limits": ("Limits", "where it fails or was not tested: ages, skin tones, poses, cameras, disguises, twins"),
    "data_licence": ("Licence of the data", "the licence of the training images, and whether the people on them agreed"),
    "weights_licence": ("Licence of the weights", "who may use the weights, and for what; that of the data may limit it"),
    "contact": ("Contact", "who answers questions, corrects errors, and removes people on request"),
}
_TEMPLATE = """\
# What only a person can say of this network. Write the text after the colon, or several lines below "key: |", each indented by
# two spaces; an empty line begins a paragraph. Then make the card again with the same command. No program changes this file.
"""
Results = Mapping[str, SetResult]
FoundResults = tuple[Results, Path | str]  # and where they are from
_FACTS = ("", "")  # the head of a list of names and values
_NUMBERS = ("set", "genuine pairs", "impostor pairs", "accuracy %", "95 % interval", "EER %", "95 % interval", "AUC")
# beside results.json: of a training's end; of a report
_PICTURES = {
    "verification.png": "ROC, and cosines of genuine and impostor pairs; errors are where they overlap",
    "curves.png": "ROC: accepted genuine pairs against accepted impostor pairs",
    "similarities.png": "cosines of genuine and impostor pairs; errors are where they overlap",
}
_PNG = b"\x89PNG\r\n\x1a\n"
_RAW = "raw: divide each by its length"
_MIRRORED = "the cosine of two embeddings, each the sum of those of an image and its mirror image"


def write_card(options: argparse.Namespace) -> None:
    """Read the network, its results and the fields, and write the card."""
    if options.untrained:
        raise ValueError("--untrained is a network without a training, of which a card has nothing to say; leave it out")
    fields_file = options.fields or options.out / "card.yaml"
    network = load_network(options, build_backbone)  # what cannot be read leaves no folder
    found = find_results(options)
    if not options.fields:
        _write_template(fields_file)
    fields = read_fields(fields_file)
    document_of(network, found, fields, options).write(options.out / "card.md")
    missing = [key for key in FIELDS if key not in fields]
    print(f"written: {shown(options.out / 'card.md')}")
    if missing:
        print(f"to be filled in, in {shown(fields_file)}: {', '.join(missing)}")


def document_of(
    network: Network, found: FoundResults, fields: Mapping[str, str], options: argparse.Namespace, metadata: str = ""
) -> Document:
    """Return the card of a network, which loses its weights.

    Args:
        found: as `find_results` returns them.
        fields: texts of FIELDS by key, as far as a person wrote them.
        metadata: what stands above the title.
    """
    results, found_in = found
    name, manifest = _origin(network)
    document = Document(f"Model card: {name}", metadata)
    document.table(_FACTS, _network_facts(network, name, manifest, options))
    for key in ("intended_use", "not_for"):
        _add_field(document, key, fields)
    _add_training(document, network.config, manifest)
    _add_field(document, "data_licence", fields)
    _add_results(document, results, found_in)
    _add_field(document, "limits", fields)
    _add_contract(document, network, options)
    for key in ("weights_licence", "contact"):
        _add_field(document, key, fields)
    return document


def _origin(network: Network) -> tuple[str, dict[str, Any]]:
    """Return the name of a network, without the folders above it, and the manifest of its checkpoint, {} for a file."""
    path = Path(network.name).resolve()
    if not is_checkpoint(path):
        return path.name, {}
    run = path.parents[1] if path.parent.name == "checkpoints" else path
    return run.name, read_manifest(path)


def find_results(options: argparse.Namespace) -> tuple[dict[str, SetResult], Path | str]:
    """Return the results of this network by set, and the folder of their file, or the reason why there are none.

    Raises:
        ValueError: --results cannot be read, or has none of this network.
    """
    path, why = results_file(options)
    if path is None:
        return {}, f"No results: {why}. Score it with face eval and --report, and make the card again with --results."
    return read_results_of(path, options.ema), path.parent


def _network_facts(network: Network, name: str, manifest: Mapping[str, Any], options: argparse.Namespace) -> Facts:
    model = network.own
    if isinstance(model, ForeignNetwork):
        facts = [("file", name), ("hash of the file", model.hash)]
        if model.contract is not None:  # of a file that face export wrote
            of_file = model.contract
            facts += [("exported from", of_file.run), ("step", of_file.step), ("backbone", of_file.backbone)]
            facts += [("hash of the weights", of_file.weights), ("precision", of_file.precision)]
        return [(name, value) for name, value in facts if value]
    facts = [("backbone", backbone_words(network.config) or str(options.backbone))]
    if manifest:
        state = "moving average of the weights, " if options.ema else ""
        facts.append(("checkpoint", f"{state}step {manifest['step']:,}"))
    facts.append(("hash of the weights", digest_tensors(model.state_dict())))
    facts.append(("parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,}"))
    operations = forward_operations(model.to("meta"), network.image_size)  # of which a multiply-add is two
    facts.append(("multiply-adds for one image", f"{operations // 2 / 1e9:.3g} billion"))
    return facts


def _add_training(document: Document, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Add the data and the recipe, as far as the checkpoint tells."""
    signature = manifest.get("run_signature", {})  # classes, images, batch, seed
    data = data_facts(config, signature)
    document.section("Training data")
    if data:
        document.table(_FACTS, data)
    else:
        document.text("Not known: no configuration of a training came with the network.")
    if config:
        document.section("Recipe")
        document.table(_FACTS, recipe_facts(config, manifest["step"], signature))


def _add_contract(document: Document, network: Network, options: argparse.Namespace) -> None:
    """Add what the network takes and what it returns."""
    model, size = network.own, network.image_size
    document.section("Input and output")
    contract = model.contract if isinstance(model, ForeignNetwork) else None
    if contract is not None:
        document.table(_FACTS, _facts_of_file(contract))
    else:
        other = network.model if isinstance(network.model, OtherInput) else None
        colour, mean, std = ("BGR" if other.bgr else "RGB", other.mean, other.std) if other else ("RGB", 127.5, 127.5)
        numbers = network.config.get("backbone", {}).get("embedding_size", options.embedding_size)
        facts = [
            ("input", f"(images, 3, {size}, {size}), {colour}, float32"),
            ("values", f"(x - {mean:g}) / {std:g}, x from 0 to 255"),
            ("output", f"embeddings{'' if isinstance(model, ForeignNetwork) else f' of {numbers} numbers'}, {_RAW}"),
            ("comparison", _MIRRORED),
        ]
        document.table(_FACTS, facts)
    document.text(f"Faces must be aligned: a similarity brings five points nearest to these places in {size} x {size} pixels.")
    places = contract.points if contract is not None else (TEMPLATE * size / IMAGE_SIZE).tolist()
    rows = [(name, f"{x:.2f}", f"{y:.2f}") for name, (x, y) in zip(POINTS, places, strict=True)]
    document.table(("point, as seen in the picture", "x", "y"), rows)


def _facts_of_file(contract: InputContract) -> Facts:
    """Return what an exported file says of its input and output."""
    size = contract.image_size
    sides = f"{size}, {size}, 3" if contract.layout == "NHWC" else f"3, {size}, {size}"
    values = "0 to 255" if contract.takes_bytes else f"(x - {contract.mean:g}) / {contract.std:g}, x from 0 to 255"
    return [
        ("input", f"(images, {sides}), {contract.colour.upper()}, {contract.dtype}"),
        ("values", values),
        ("output", f"embeddings of {contract.embedding_size} numbers, {'of length 1' if contract.normalised else _RAW}"),
        ("comparison", "the cosine of two embeddings, which include the mirror image" if contract.mirrored else _MIRRORED),
    ]


def _add_field(document: Document, key: str, fields: Mapping[str, str]) -> None:
    """Add a section that a person writes."""
    heading, asks = FIELDS[key]
    document.section(heading)
    if key in fields:
        document.text(fields[key])
    else:
        document.missing(asks)


def read_fields(path: Path) -> dict[str, str]:
    """Return the texts of the fields that are filled in, by key.

    Raises:
        ValueError: the file cannot be read, has a key that is no field, or a value that is no text.
    """
    with reading(path):
        text = read_text(path, MAX_SMALL_TEXT)
    try:
        found = read_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{shown(path)}: not the fields of a card: {_where(error)}") from None
    if is_nothing(found):
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{shown(path)}: not the fields of a card: it must have lines 'field: text'")
    for key, value in found.items():
        if key not in FIELDS:
            hint = did_you_mean(str(key), FIELDS)
            raise ValueError(f"{shown(path)}: {one_line(repr(key))[:80]} is no field.{hint} They are {', '.join(FIELDS)}")
        if not is_nothing(value) and not isinstance(value, str):
            raise ValueError(f"{shown(path)}: {key} must be text; put it in quotes, or below '{key}: |'")
    return {str(key): str(value) for key, value in found.items() if not is_nothing(value) and str(value).strip()}


def _write_template(path: Path) -> None:
    """Write a file of empty fields, unless there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [_TEMPLATE, *(f"# {heading}: {asks}\n{key}:\n" for key, (heading, asks) in FIELDS.items())]
    with contextlib.suppress(FileExistsError), NewFile(path) as file:  # never replaces what a person wrote meanwhile
        try:
            file.write("\n".join(lines).encode())
            file.close()
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from None  # fsync names no file


def _where(error: Exception) -> str:
    """Return the first fault of a YAML text, with its line."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or error
    return one_line(f"line {mark.line + 1}: {what}" if mark else what)[:300]


def _add_results(document: Document, results: Results, found_in: Path | str) -> None:
    """Add the sections of the results; `found_in` is the folder of their file, or a sentence that says why there are none."""
    document.section("Results")
    if isinstance(found_in, str):
        document.text(found_in)
        return
    document.text(
        "Verification: do two images show the same person? Accuracy is the mean over ten folds. EER is the rate at which FAR "
        "equals the share of rejected genuine pairs. The intervals take the pairs as independent; pairs that share a person "
        "are not, so the true intervals are somewhat wider."
    )
    document.table(_NUMBERS, [_numbers_row(result) for result in results.values()])
    one_kind = [result.name for result in results.values() if 0 in (result.num_genuine, result.num_impostor)]
    if one_kind:
        document.text(f"- : not measurable; {', '.join(one_kind)} has pairs of one kind only.")
    bare = [result.name for result in results.values() if "accuracy" not in result.intervals]
    if bare:
        document.text(f"No intervals in the file: {', '.join(bare)}. face eval --report writes them.")
    document.section("Thresholds")
    document.text(
        "A pair is accepted if its cosine is above the threshold. TAR is the share of the genuine pairs that are accepted, FAR "
        "that of the impostor pairs. Choose the FAR that your use tolerates, and the set that resembles it most."
    )
    rows = []
    for result in results.values():
        rows += point_rows(result.name, result.points, result.intervals)
    document.table(POINT_COLUMNS, rows)
    few = [
        f"{result.name} has {result.num_impostor:,} impostor pairs"
        for result in results.values()
        if result.num_impostor is not None and any(point.cosine is None for point in result.points)
    ]
    if few:
        document.text(f"- : not measurable. A FAR of F needs 1 / F impostor pairs: {'; '.join(few)}.")
    for name, words in _PICTURES.items():
        if (found_in / name).is_file():
            png = read_bytes(found_in / name, MAX_SMALL_TEXT)
            if png.startswith(_PNG):
                document.picture(f"card_{name}", png, words)
    _add_errors(document, results, found_in)


def _add_errors(document: Document, results: Results, folder: Path) -> None:
    """Say where the pictures of the worst errors are; they show people, and so are not on the card."""
    document.section("Errors")
    names = [f"{name}_{kind}.png" for name in results for kind in ("false_matches", "false_non_matches")]
    found = [name for name in names if Path(name).name == name and os.path.isfile(folder / name)]  # False for too long a name
    if not found:
        document.text("face eval --report draws the worst errors of each set, as pictures beside its results.json.")
        return
    document.text(
        f"The worst errors are drawn beside results.json: {', '.join(found)}. In false matches the network takes two people "
        "for one, in false non-matches one person for two. The pictures show people, so they are not on this card."
    )


def _numbers_row(result: SetResult) -> tuple[object, ...]:
    genuine, impostor = ("-" if count is None else count for count in (result.num_genuine, result.num_impostor))
    accuracy, eer = (range_text(result.intervals.get(key)) for key in ("accuracy", "eer"))
    auc = "-" if result.auc is None else f"{result.auc:.4f}"
    return result.name, genuine, impostor, percent(result.accuracy, "-"), accuracy, percent(result.eer, "-"), eer, auc
