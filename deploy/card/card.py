"""Writes a model card: what the network, its checkpoint, its results and a person say, in this order."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from backbones import build_backbone
from eval.foreign_networks import ForeignNetwork
from eval.input_contract import InputContract
from eval.networks import Network, OtherInput, load_network
from utils.alignment import POINTS, TEMPLATE
from utils.checkpoint.format import is_checkpoint, read_manifest
from utils.distributed.agreement import digest_tensors
from utils.files import shown
from utils.image import IMAGE_SIZE
from utils.memory import forward_operations

from ..results_file import SetResult, read_results_of
from .document import Document
from .facts import Facts, backbone_words, data_facts, planned_steps, recipe_facts
from .fields import FIELDS, read_fields, write_template
from .results import add_results

_RAW = "raw: divide each by its length"
_MIRRORED = "the cosine of two embeddings, each the sum of those of an image and its mirror image"


class Subject(NamedTuple):
    """The network that a card describes."""

    network: Network
    name: str  # without the folders above it
    manifest: dict[str, Any]  # of its checkpoint, {} for a file

    @property
    def signature(self) -> dict[str, Any]:
        """What the manifest says of the run: classes, images, batch, seed."""
        found: dict[str, Any] = self.manifest.get("run_signature", {})
        return found


def write_card(options: argparse.Namespace) -> None:
    """Read the network, its results and the fields, and write the card."""
    if options.untrained:
        raise ValueError("--untrained is a network without a training, of which a card has nothing to say; leave it out")
    fields_file = options.fields or options.out / "card.yaml"
    subject = _open(options)  # what cannot be read leaves no folder
    results, found_in = _find_results(options, subject)
    if not options.fields:
        write_template(fields_file)
    fields = read_fields(fields_file)
    document = Document(f"Model card: {subject.name}")
    document.facts(_network_facts(subject, options))
    for key in ("intended_use", "not_for"):
        _add_field(document, key, fields)
    _add_training(document, subject)
    _add_field(document, "data_licence", fields)
    add_results(document, results, found_in)
    _add_field(document, "limits", fields)
    _add_contract(document, subject, options)
    for key in ("weights_licence", "contact"):
        _add_field(document, key, fields)
    document.write(options.out, "card")
    missing = [key for key in FIELDS if key not in fields]
    print(f"written: {shown(options.out / 'card.md')}, {shown(options.out / 'card.html')}")
    if missing:
        print(f"to be filled in, in {shown(fields_file)}: {', '.join(missing)}")


def _open(options: argparse.Namespace) -> Subject:
    network = load_network(options, build_backbone)
    path = Path(network.name).resolve()
    if not is_checkpoint(path):
        return Subject(network, path.name, {})
    run = path.parents[1] if path.parent.name == "checkpoints" else path
    return Subject(network, run.name, read_manifest(path))


def _find_results(options: argparse.Namespace, subject: Subject) -> tuple[dict[str, SetResult], Path | str]:
    """Return the results of this network by set, and the folder of their file, or the reason why there are none.

    Raises:
        ValueError: --results cannot be read, or has none of this network.
    """
    again = "Score it with python -m eval and --report, and make the card again with --results"
    path: Path | None = options.results
    if path is None:
        path = options.run / "results.json"
        if not subject.manifest:
            return {}, f"No results: the network is a file, which has none beside it. {again}."
        if options.best or is_checkpoint(options.run) or not path.is_file():
            return {}, f"No results: none were given for this checkpoint. {again}."
        step, last = subject.manifest["step"], planned_steps(subject.network.config, subject.signature)
        if step != last:
            return {}, f"No results: results.json is of the run's last step, and this checkpoint is of step {step:,}. {again}."
    return read_results_of(path, options.ema), path.parent


def _network_facts(subject: Subject, options: argparse.Namespace) -> Facts:
    network = subject.network
    model = _without_input(network)
    if isinstance(model, ForeignNetwork):
        facts = [("file", subject.name), ("hash of the file", model.hash)]
        if model.contract is not None:  # of a file that scripts.deploy.export wrote
            of_file = model.contract
            facts += [("exported from", of_file.run), ("step", of_file.step), ("backbone", of_file.backbone)]
            facts += [("hash of the weights", of_file.weights), ("precision", of_file.precision)]
        return [(name, value) for name, value in facts if value]
    facts = [("backbone", backbone_words(network.config) or str(options.backbone))]
    if subject.manifest:
        state = "moving average of the weights, " if options.ema else ""
        facts.append(("checkpoint", f"{state}step {subject.manifest['step']:,}"))
    facts.append(("hash of the weights", digest_tensors(model.state_dict())))
    facts.append(("parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,}"))
    facts.append(("multiply-adds for one image", f"{_multiply_adds(model, network.image_size) / 1e9:.3g} billion"))
    return facts


def _without_input(network: Network) -> nn.Module:
    """Return the network itself, without the conversion of its input."""
    return network.model.model if isinstance(network.model, OtherInput) else network.model


def _multiply_adds(model: nn.Module, image_size: int) -> int:
    """Return the multiply-adds of a forward pass without computing it; the model loses its weights."""
    return forward_operations(model.to("meta"), image_size) // 2


def _add_training(document: Document, subject: Subject) -> None:
    """Add the data and the recipe, as far as the checkpoint tells."""
    config, signature = subject.network.config, subject.signature
    data = data_facts(config, signature)
    document.section("Training data")
    document.facts(data) if data else document.text("Not known: no configuration of a training came with the network.")
    if config:
        document.section("Recipe")
        document.facts(recipe_facts(config, subject.manifest["step"], signature))


def _add_contract(document: Document, subject: Subject, options: argparse.Namespace) -> None:
    """Add what the network takes and what it returns."""
    network, size = subject.network, subject.network.image_size
    model = _without_input(network)
    document.section("Input and output")
    contract = model.contract if isinstance(model, ForeignNetwork) else None
    if contract is not None:
        document.facts(_facts_of_file(contract))
    else:
        other = network.model if isinstance(network.model, OtherInput) else None
        colour, mean, std = ("BGR" if other.bgr else "RGB", other.mean, other.std) if other else ("RGB", 127.5, 127.5)
        numbers = network.config.get("backbone", {}).get("embedding_size", options.embedding_size)
        document.facts(
            [
                ("input", f"(images, 3, {size}, {size}), {colour}, float32"),
                ("values", f"(x - {mean:g}) / {std:g}, x from 0 to 255"),
                ("output", f"embeddings{'' if isinstance(model, ForeignNetwork) else f' of {numbers} numbers'}, {_RAW}"),
                ("comparison", _MIRRORED),
            ]
        )
    document.text(
        f"Faces must be aligned: a similarity transform brings five points nearest to these places in {size} x {size} pixels."
    )
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


def _add_field(document: Document, key: str, fields: dict[str, str]) -> None:
    """Add a section that a person writes."""
    document.section(FIELDS[key].heading)
    if key in fields:
        document.text(fields[key])
    else:
        document.missing(FIELDS[key].asks)
