"""Opens a face detector: YuNet through OpenCV, SCRFD and RetinaFace through onnxruntime. The outputs of the file tell which.

ONNX files are data: reading them executes nothing. A file that refers to tensors outside its own folder is refused.
"""

import argparse
import re
from pathlib import Path

from eval.foreign_networks import check_outside_data, parse_onnx
from utils.cli import int_in_range
from utils.files import check_file

from .detections import LONGEST, Detector, Face, Session, Settings
from .retinaface import RetinaFace
from .scrfd import Scrfd
from .yunet import OUTPUTS, YuNet

__all__ = ["Detector", "Face", "add_detector_arguments", "open_detector"]


def add_detector_arguments(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add the arguments that `open_detector` reads."""
    parser.add_argument(
        "--detector",
        type=Path,
        required=required,
        metavar="FILE.onnx",
        help="a face detector: YuNet, SCRFD with landmarks, or RetinaFace"
        + ("" if required else " (without it, pictures are aligned crops)"),
    )
    parser.add_argument(
        "--min-score",
        type=_share,
        metavar="P",
        help="faces with a lower score do not count (default: 0.5 for SCRFD, 0.6 for RetinaFace, 0.9 for YuNet, as their "
        "authors have it)",
    )
    parser.add_argument(
        "--min-size",
        type=int_in_range(1, 32000),
        default=20,
        metavar="PIXELS",
        help="nor do those with a shorter side (default 20)",
    )
    parser.add_argument(
        "--overlap",
        type=_share,
        default=0.4,
        help="of two boxes that share more of their union, the weaker is dropped (default 0.4)",
    )
    parser.add_argument(
        "--longest-side",
        type=int_in_range(64, LONGEST),
        default=640,
        metavar="PIXELS",
        help="a larger picture is shrunk to this for the detector, if its file leaves the size open (default 640)",
    )


def open_detector(options: argparse.Namespace) -> Detector | None:
    """Return the detector of the command line, or None without --detector.

    Raises:
        ValueError: the file cannot be read, or is no detector with landmarks.
    """
    path: Path | None = options.detector
    if path is None:
        return None
    check_file(path)
    settings = Settings(options.min_score, options.min_size, options.overlap, options.longest_side)
    check_outside_data(path)
    names, fixed = _signature(path)
    if names >= OUTPUTS:
        return YuNet(path, settings, fixed)
    session = Session(path)
    if len(names) == 3:
        return RetinaFace(path, settings, session)
    if len(names) == 9:
        return Scrfd(path, settings, session)
    if len(names) == 6:
        raise ValueError(
            f"{path}: a detector without landmarks, and faces are aligned by them; take the file with keypoints (kps)"
        )
    raise ValueError(
        f"{path}: no detector that is known here: YuNet has the outputs {', '.join(sorted(OUTPUTS))}, SCRFD nine, RetinaFace "
        f"three, this has {len(names)}"
    )


def _signature(path: Path) -> tuple[set[str], tuple[int, int] | None]:
    """Return the names of the outputs of an ONNX file, and the fixed (height, width) of its input, if they are."""
    graph = parse_onnx(path).graph
    names = {entry.name for entry in graph.output}
    for entry in graph.input:
        sides = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
        if len(sides) == 4:
            return names, (sides[2], sides[3]) if sides[2] > 0 and sides[3] > 0 else None
    return names, None


def _share(text: str) -> float:
    if not re.fullmatch(r"0?\.[0-9]+|[01](\.0*)?", text):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text}")
    return float(text)
