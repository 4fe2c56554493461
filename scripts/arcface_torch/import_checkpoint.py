"""Import a checkpoint of arcface_torch: writes its backbone, class centres and moments as a checkpoint of this project.

SOURCE is the output folder of an arcface_torch run, of any year: backbone.pth with rank_{r}_softmax_weight.pt, model.pt with
softmax_fc_gpu_{r}.pt, or checkpoint_gpu_{r}.pt; see docs/migration.md. Nothing in these files is executed.
The class centres are written block by block, without a second copy in memory.

Example: face migrate checkpoint arcface_torch/work_dirs/ms1mv3_r50 work_dirs/mine --num-classes 93431
"""

from pathlib import Path

from migration.arcface_torch import import_checkpoint
from migration.checkpoint_files import HEADS, LAST_STEP
from utils.cli import int_in_range, make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face migrate checkpoint", __doc__)
    parser.add_argument("source", type=Path, help="folder with the files of arcface_torch")
    parser.add_argument("run", type=Path, help="run folder to write into, work_dirs/NAME for run.name=NAME")
    parser.add_argument("--era", choices=tuple(HEADS), help="kind of files, if the folder has several kinds")
    parser.add_argument("--num-classes", type=int_in_range(1), metavar="N", help="classes of the set (default: of the files)")
    parser.add_argument("--fill", choices=("random",), help="start classes without a centre, the last ones, as in a new run")
    parser.add_argument("--seed", type=int_in_range(0), default=2048, help="run.seed of the run that continues")
    parser.add_argument("--step", type=int_in_range(0, LAST_STEP), help="finished steps (default: of the files, or 0)")
    parser.add_argument("--ranks", type=int_in_range(1, 99999), default=1, help="files for the class centres; any number reads")
    return run_main(import_checkpoint, parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
