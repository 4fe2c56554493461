"""Export a checkpoint to arcface_torch: writes its files to OUT, in the layout of any of its years.

checkpoint_gpu   model.pt, checkpoint_gpu_{r}.pt with all moments, for resume=True; 2022-05 and later
softmax_fc_gpu   model.pt, softmax_fc_gpu_{r}.pt; early 2022
backbone.pth     backbone.pth, rank_{r}_softmax_weight.pt and ..._mom.pt; 2021

Class centres are in the order of the labels and keep their norms; --ranks must be the number of processes there.
Of the schedule only the position is stored, and only by checkpoint_gpu; arcface_torch's own configuration determines the rest.

Example: face migrate export work_dirs/ms1mv3_r50 exported --ranks 8
"""

from pathlib import Path

from migration.arcface_torch import export_checkpoint
from migration.checkpoint_files import HEADS
from utils.cli import int_in_range, make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face migrate export", __doc__)
    parser.add_argument("checkpoint", type=Path, help="checkpoint folder, or run folder for its newest")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--ranks", type=int_in_range(1, 99999), default=8, help="processes of arcface_torch")
    parser.add_argument("--era", choices=tuple(HEADS), default="checkpoint_gpu", help="layout")
    return run_main(export_checkpoint, parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
