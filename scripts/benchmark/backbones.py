"""Compare the backbones: face bench backbones

Prints a table of all networks: parameters, multiply-adds of a forward pass, memory that autograd keeps per image in training,
and milliseconds per image of a forward and backward pass on this device. Each network takes turns with r18, so that other load
on the machine meets both; the ratio to r18 is the median over the rounds. Parameters and multiply-adds are counted on the meta
device, which computes nothing. Multiply-adds are half the operations that torch counts; papers call them FLOPs, too.

A network of more than --largest million parameters is counted, but not run. Times need a machine with nothing else to do; all
other figures do not, and --no-times leaves it at these.

Examples:
  face bench backbones --quick
  face bench backbones --names r50 mbf mbf_large --batch 16 --json backbones.json
  face bench backbones --no-times
  face bench backbones --page docs/backbones.md
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backbones import build_backbone, list_backbones
from utils.cli import int_in_range, make_parser
from utils.distributed import choose_device
from utils.image import IMAGE_SIZE
from utils.memory import backbone_memory, forward_operations
from utils.precision import AUTOCAST
from utils.program import run_main
from utils.report import make_figure
from utils.text import label_text, markdown_table, prefix_errors

from .kit import add_common_arguments, clock, gpu_figures, machine, take_turns, write_into_page, write_json

BEGIN = "<!-- begin: written by face bench backbones -->"
_REFERENCE = "r18"
_QUICK = ("r18", "mbf")
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench backbones", __doc__)
    count = int_in_range(1)
    parser.add_argument("--names", nargs="+", default=[], metavar="NAME", help="values of backbone.name; default: all")
    parser.add_argument("--width", type=float, default=1.0, help="factor on the channels of those that take it")
    parser.add_argument("--embedding-size", type=count, default=512, help="D, numbers per face")
    parser.add_argument("--image-size", type=count, default=IMAGE_SIZE, help="height and width of the images in pixels")
    parser.add_argument("--batch", type=count, default=8, help="images of a step")
    parser.add_argument("--precision", choices=tuple(AUTOCAST), default="fp32", help="of the forward and backward pass")
    parser.add_argument("--largest", type=count, default=200, help="millions of parameters of a network that is run")
    parser.add_argument("--no-times", action="store_true", help="take no steps: parameters, multiply-adds and memory alone")
    parser.add_argument("--threads", type=int_in_range(0), default=0, help="CPU threads, 0 = as torch chooses")
    add_common_arguments(parser, "two networks of an eighth of the width, seconds on a CPU", rounds=5)
    parser.add_argument("--page", type=Path, help="write the table into this page, the picture into images beside it")
    return run_main(benchmark, parser.parse_args(arguments))


def benchmark(options: argparse.Namespace) -> None:
    """Count, run and print network by network; then write the JSON and the page."""
    if options.quick:
        options.names, options.width = options.names or list(_QUICK), options.width / 8
        options.batch, options.rounds = min(options.batch, 2), min(options.rounds, 2)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device, 0)
    words = describe(options, device)
    print(f"{words}\n\n{_line(_HEADER)}", flush=True)
    rows: list[Row] = []
    for row in measure(options, device):
        rows.append(row)
        print(_line(_cells(row)), flush=True)
        write_json(options.json, {"machine": machine(device.type), "setup": words, "rows": rows})
    if options.page:
        table = [_HEADER, *map(_cells, rows)]
        kept = [place for place in range(len(_HEADER)) if any(line[place] for line in table[1:])]
        text = f"{words}\n\n{markdown_table([[line[place] for place in kept] for line in table])}"
        timed = [row for row in rows if row["ms_per_image"] is not None]
        if timed:
            text += "\n\n![Time of a step of each network](images/backbones.png)"
        write_into_page(options.page, text, BEGIN)
        if timed:
            (options.page.parent / "images").mkdir(exist_ok=True)
            draw(timed, options.page.parent / "images" / "backbones.png")


def describe(options: argparse.Namespace, device: torch.device) -> str:
    """Return one line about the networks and the machine."""
    size = f"width {options.width:g}, D = {options.embedding_size}, images of {options.image_size} x {options.image_size}"
    if options.no_times:
        return f"{size}, {options.precision}; times not measured yet."
    return f"{size}, {options.precision}, {options.batch} images a step; {machine(device.type)}."


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Yield a row of figures per network.

    Raises:
        ValueError: a network does not exist, or does not take the width or the size of images.
    """
    reference: _Steps | None = None
    for name in options.names or list_backbones():
        with prefix_errors("--names, --width, --embedding-size, --image-size"):
            parameters, multiply_adds = count(name, options)
        row: Row = {"name": name, "parameters": parameters, "multiply_adds": multiply_adds}
        row |= {"kept_bytes_per_image": None, "ms_per_image": None, "ratio": None, "ratio_range": None}
        if parameters <= 1e6 * options.largest:
            steps = _Steps(name, options, device)
            memory = backbone_memory(steps.network, steps.autocast, moments=1, image_size=options.image_size)
            row["kept_bytes_per_image"] = memory.per_image
            if not options.no_times:
                reference = reference or _Steps(_REFERENCE, options, device)
                row |= _times(steps, reference, options)
        yield row


def count(name: str, options: argparse.Namespace) -> tuple[int, int]:
    """Return the parameters of a network, and the multiply-adds of its forward pass of one image, without computing it."""
    with torch.device("meta"):
        network = _build(name, options)
    operations = forward_operations(network, options.image_size)
    return sum(parameter.numel() for parameter in network.parameters()), operations // 2


def _build(name: str, options: argparse.Namespace) -> nn.Module:
    return build_backbone(name, options.embedding_size, options.width, image_size=options.image_size)


class _Steps:
    """A network that takes steps: forward and backward passes, without an optimizer."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        self.network = _build(name, options).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        shape = (options.batch, 3, options.image_size, options.image_size)
        self.images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
        self.device, self.autocast = device, AUTOCAST[options.precision]

    def seconds(self) -> float:
        """Take a step; return how long it took."""
        self.network.zero_grad(set_to_none=True)
        begun = clock(self.device)
        with torch.autocast(self.device.type, self.autocast, self.autocast is not None):
            embeddings = self.network(self.images)
        embeddings.float().square().mean().backward()
        return clock(self.device) - begun


def _times(steps: _Steps, reference: _Steps, options: argparse.Namespace) -> Row:
    """Return the times of a network that takes turns with the reference."""
    turns = take_turns({"own": steps.seconds, "other": reference.seconds}, 1 + options.rounds)
    ratios = [own / other for own, other in zip(*turns.values(), strict=True)][1:]
    own = [1e3 * seconds / options.batch for seconds in turns["own"][1:]]
    return {
        "ms_per_image": statistics.median(own),
        "ms_range": [min(own), max(own)],
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        **gpu_figures(steps.seconds, steps.device),
    }


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # title: key of a row, and its text
    "network": ("name", str),
    "M parameters": ("parameters", lambda count: f"{count / 1e6:.2f}"),
    "G multiply-adds": ("multiply_adds", lambda count: f"{count / 1e9:.2f}"),
    "MiB kept per image": ("kept_bytes_per_image", lambda count: f"{count / 2**20:.1f}"),
    "ms per image": ("ms_per_image", "{:.1f}".format),
    "times r18": ("ratio", "{:.2f}".format),
    "range of rounds": ("ratio_range", lambda ends: "{:.2f} to {:.2f}".format(*ends)),
}
_HEADER = tuple(_COLUMNS)


def _line(cells: Sequence[str]) -> str:
    name, *numbers = cells
    return "  ".join([f"{name:<24}", *(f"{cell:>{len(title)}}" for title, cell in zip(_HEADER[1:], numbers, strict=True))])


def _cells(row: Row) -> list[str]:
    """Return the texts of a row of the table."""
    return ["" if row[key] is None else text(row[key]) for key, text in _COLUMNS.values()]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of each network, the fastest on top, with its multiply-adds beside it."""
    ordered = sorted(rows, key=lambda row: -row["ms_per_image"])
    figure = make_figure(8, 1.2 + 0.28 * len(rows), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="ms per image, forward and backward")
    axes.plot([row["ms_per_image"] for row in ordered], [label_text(row["name"]) for row in ordered], "o")
    for place, row in enumerate(ordered):
        words = f"  {row['multiply_adds'] / 1e9:.2g} G multiply-adds"
        axes.text(row["ms_per_image"], place, words, fontsize=8, verticalalignment="center")
    axes.margins(x=0.3)
    axes.grid(True, linewidth=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
