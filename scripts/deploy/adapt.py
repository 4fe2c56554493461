"""Fit an adapter from an old network's embeddings to a new one's: face adapt OLD NEW [FOLDER] --out FILE

For galleries without pictures, which cannot be embedded anew: `face gallery adapt` then makes one of the new network of them.
OLD and NEW are networks, and FOLDER has pictures with a sub-folder for each person; or they are two tables of `face embed`,
.parquet, of the same folder. The people should be like those of the galleries, and trained on by neither network.

The best of --kinds is taken, by the TAR among adapted and new embeddings of people whom it was not fitted on. The table is of
other people again: TAR with 95 % intervals of new and new, old and old, adapted and new embeddings.

Examples:
  face adapt work_dirs/old work_dirs/new people --out adapter.safetensors
  face adapt old.parquet new.parquet --kinds linear --out adapter.safetensors
"""

import argparse
import os
from pathlib import Path

from deploy.embed.adapter import KINDS, fit, write_adapter
from deploy.faces.detector import add_detector_arguments
from deploy.faces.pictures import add_which_argument
from deploy.gallery.commands import add_person_arguments
from deploy.gallery.pairs import read_pairs
from eval.networks import add_network_arguments
from utils.cli import make_parser
from utils.files import shown, write_file
from utils.program import run_main
from utils.text import markdown_table


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face adapt", __doc__)
    parser.add_argument("old", type=Path, help="network of the galleries, or table")
    parser.add_argument("new", type=Path, help="network that replaces it, or table")
    parser.add_argument("folder", type=Path, nargs="?", help="pictures, for networks")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".safetensors; the table goes to FILE.md")
    kinds = "maps to choose among (default: all that fit); identity: as they are, for a network trained with compatible.path"
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help=kinds)
    add_network_arguments(parser, positional=False)
    add_person_arguments(parser)
    add_detector_arguments(parser)
    add_which_argument(parser, one=True)
    return run_main(adapt, parser.parse_intermixed_args(arguments))


def adapt(options: argparse.Namespace) -> None:
    """Fit, and write the adapter and its table."""
    out: Path = options.out
    table = out.with_name(f"{out.name}.md")
    if out.suffix != ".safetensors":
        raise ValueError(f"--out: must end in .safetensors, got {shown(out)}")
    for path in (out, table):
        if os.path.lexists(path):
            raise ValueError(f"--out: {shown(path)} exists already; choose another name")
    pairs, old, new = read_pairs(options)
    kinds = options.kinds or [kind for kind in KINDS if kind != "identity" or old.embedding_size == new.embedding_size]
    adapter, rows, scores = fit(pairs, list(dict.fromkeys(kinds)), old, new)
    targets = [point.target for point in rows[0].points]
    cells = [["embeddings of gallery and query", *(f"TAR at FAR {target}, %" for target in targets), "pairs"]]
    for row in rows:
        found = [(100 * (point.tar or 0), *(100 * end for end in row.intervals[point.target])) for point in row.points]
        counts = f"{row.genuine.size:,} genuine, {row.impostor.size:,} impostor"
        cells.append([row.name, *(f"{tar:.2f} ({low:.2f} to {high:.2f})" for tar, low, high in found), counts])
    text = markdown_table(cells)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_adapter(out, adapter)
    write_file(table, f"{text}\n".encode())
    if len(scores) > 1:
        rates = ", ".join(f"{kind} {100 * max(score, 0.0):.2f} %" for kind, score in scores.items())
        print(f"TAR by which the kind was chosen: {rates}")
    print(f"{text}\n{shown(out)}: {adapter.kind}, from {len(pairs.people):,} pictures, a part of whose people made the table")


if __name__ == "__main__":
    raise SystemExit(main())
