"""The gate: faces that are too poor to be searched for stay out of a gallery, or out of a folder of crops."""

import argparse
from typing import NamedTuple

from utils.cli import SHARE, number_in_range


class Gate(NamedTuple):
    """What a face must have to be enrolled; every face has it by default."""

    min_norm: float = 0.0  # of its raw embedding
    max_padding: float = 1.0  # share of its crop outside its picture

    def reason(self, norm: float, padding: float) -> str:
        """Return why a face is refused, "" if it is not."""
        if norm < self.min_norm:
            return f"its embedding has length {norm:#.4g}, and --min-norm is {self.min_norm:g}"
        if padding > self.max_padding:
            return f"{100 * padding:.1f} % of its crop are outside the picture, and --max-padding is {self.max_padding:g}"
        return ""


EVERY_FACE = Gate()


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `gate_of` reads."""
    text = (
        "reject a face whose embedding is shorter. Lengths are those of one network: enrol good and poor pictures, print "
        "theirs by face gallery show --images, and choose X between them"
    )
    parser.add_argument("--min-norm", type=number_in_range(0, what="a length"), default=0.0, metavar="X", help=text)
    add_padding_argument(parser)


def add_padding_argument(parser: argparse.ArgumentParser) -> None:
    """Add --max-padding, which `face detect` has too."""
    parser.add_argument("--max-padding", type=SHARE, default=1.0, metavar="P", help="most of a crop outside its picture")


def gate_of(options: argparse.Namespace, may_enrol: bool = True) -> Gate:
    """Return the gate of a command line; ValueError if it is given where nobody may enrol."""
    gate = Gate(options.min_norm, options.max_padding)
    if gate != EVERY_FACE and not may_enrol:
        flag = "--min-norm" if gate.min_norm else "--max-padding"
        raise ValueError(f"{flag} is of pictures that are enrolled; give --gallery, and --keys with a key of the role change")
    return gate
