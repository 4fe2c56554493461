"""Show what augmentation does: face data show_augmentation SET sheet.png

Draws a PNG with some pictures: unchanged, with each operation alone at its configured strength, and as training would see them.

Examples:
  face data show_augmentation datasets/demo sheet.png
  face data show_augmentation datasets/demo sheet.png augment.blur=0.5 augment.jpeg=0.5 --columns 6
"""

import argparse
from pathlib import Path

import numpy as np

from configs import load_config
from data.augment import OPERATIONS, Augment
from data.scan import open_set_of
from utils.cli import int_in_range, make_parser
from utils.program import run_main
from utils.report import sheet

_SHARE = "augment.crop=0.2 augment.low_resolution=0.2 augment.photometric=0.2"


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data show_augmentation", __doc__)
    parser.add_argument("set", type=Path, help="folder with train.rec, *.tar or a folder per person; or a list of 'path label'")
    parser.add_argument("out", type=Path, help="PNG file")
    parser.add_argument("overrides", nargs="*", default=_SHARE.split(), help="augment.KEY=VALUE ...")
    parser.add_argument("--config", type=Path, help="YAML file of a run (default: configs/base.yaml)")
    parser.add_argument("--columns", type=int_in_range(1, 100), default=8, help="number of pictures")
    parser.add_argument("--seed", type=int_in_range(0), default=0, help="random seed of pictures and changes (default 0)")
    return run_main(show, parser.parse_intermixed_args(arguments))


def show(options: argparse.Namespace) -> None:
    """Draw the sheet."""
    base = Path(__file__).parents[2] / "configs" / "base.yaml"
    config = load_config(options.config or base, options.overrides)
    section, size = dict(config.augment), config.data.image_size
    dataset = open_set_of(options.set)
    count = min(options.columns, dataset.num_stored)
    indices = np.sort(np.random.default_rng(options.seed).choice(dataset.num_stored, count, replace=False))
    pictures = np.empty((count, size, size, 3), dtype=np.uint8)
    for row, index in enumerate(indices.tolist()):
        dataset.decode_into(index, pictures[row])
    rows = [("as they are", list(pictures))]
    off = {**section, **dict.fromkeys(OPERATIONS, 0.0)}
    for name in OPERATIONS:
        strengths = [f"{key} {section[key]:g}" for key in section if key.startswith(f"{name}_")]
        rows.append((", ".join([name, *strengths]), changed(pictures, {**off, name: 1.0}, options.seed, 0)))
    shares = ", ".join(f"{name} {section[name]:g}" for name in OPERATIONS if section[name] > 0) or "nothing"
    for epoch in range(2):
        rows.append((f"training with {shares}, epoch {epoch}", changed(pictures, section, options.seed, epoch)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(sheet(rows, count))
    print(f"{options.out}: {count} pictures, {len(rows)} rows")


def changed(pictures: np.ndarray, section: dict[str, float], seed: int, epoch: int) -> list[np.ndarray]:
    """Return the pictures (n, H, W, 3) uint8 as training would see them in an epoch."""
    augment = Augment(section, seed)
    copies = pictures.copy()
    for picture, numbers in zip(copies, augment.draw(np.arange(len(copies)) + 1000 * epoch), strict=True):
        augment.apply(picture, numbers)
    return list(copies)


if __name__ == "__main__":
    raise SystemExit(main())
