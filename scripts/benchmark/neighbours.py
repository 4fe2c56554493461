"""Measure the searches for the nearest classes (head.sampling=neighbours): time, and recall of the approximate one.

face bench neighbours [--json FILE]

The centres are random, or clustered: groups of 20 whose members have a given cosine with each other, in a random order. In many
dimensions random centres are nearly orthogonal to one another, so no list holds a class's neighbours together; they are the
worst case. Exact search is timed for a sample of classes and extrapolated to all. The inverted lists are built and searched for
all classes, once for each number of probes. recall = share of the found neighbours that are among the exact ones of the sample.

Examples:
  face bench neighbours --quick
  face bench neighbours --classes 1000000 --centres clustered --probes 32
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partial_fc.centres.store import CentreStore
from partial_fc.collectives import Collectives
from partial_fc.sampling.neighbour_search import QUERIES, InvertedLists, UnitCentres, hits, search_exact
from partial_fc.workspace import Workspace
from utils import distributed
from utils.cli import int_in_range, make_parser, progress
from utils.program import run_main

from .kit import add_common_arguments, clock, machine, write_json

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_GROUP = 20  # clustered centres in one group
_BLOCK = 65536  # centres drawn at once
_NEIGHBOURS = 10  # head.neighbours


def main(arguments: list[str] | None = None) -> int:
    positive = int_in_range(1)
    parser = make_parser("face bench neighbours", __doc__)
    parser.add_argument("--classes", type=int_in_range(2), nargs="+", default=[100_000], help="numbers of identities")
    parser.add_argument("--centres", nargs="+", choices=("random", "clustered"), default=["random", "clustered"], help="drawn")
    parser.add_argument("--cosine", type=float, default=0.4, help="expected cosine within a group of clustered centres")
    parser.add_argument("--dim", type=positive, default=512, help="embedding size")
    parser.add_argument("--probes", type=positive, nargs="+", default=[8, 32, 128], help="values of head.neighbours_probes")
    parser.add_argument("--matmul", nargs="+", choices=tuple(_DTYPES), default=["fp32", "bf16"], help="dtypes of the products")
    parser.add_argument("--sample", type=positive, default=4096, help="classes that are searched exactly, for time and recall")
    add_common_arguments(parser, "20,000 identities, 8 and 32 probes: under a minute on two cores")
    options = parser.parse_args(arguments)
    if options.quick:
        options.classes, options.probes, options.sample = [20_000], [8, 32], 2048
    if not 0 <= options.cosine < 1:
        parser.error(f"argument --cosine: must be from 0 to below 1, got {options.cosine}")
    return run_main(benchmark, options)


def benchmark(options: argparse.Namespace) -> None:
    """Measure every case, print the table, write the requested file."""
    device = distributed.choose_device(options.device, 0)
    workspace, rows = Workspace(device, 0), list[dict[str, Any]]()
    print(f"{machine(device.type)}\nD = {options.dim}, {_NEIGHBOURS} neighbours per class\n")
    print(f"{'classes':>9} {'centres':<10} {'products':<9} {'search':<26} {'pairs':>7} {'seconds':>9} {'GMAC/s':>8}  recall")
    for num_classes in options.classes:
        for kind in options.centres:
            # "tiny" takes the least memory beside the centres
            store = CentreStore(num_classes, options.dim, "tiny", False, count_updates=False, block=1, workspace=workspace)
            cosine = options.cosine if kind == "clustered" else 0.0
            store.tensors["centres"].copy_(make_centres(num_classes, options.dim, cosine))
            store.refresh_norms()
            for matmul in options.matmul:
                centres = UnitCentres(store, num_classes, 0, _DTYPES[matmul], Collectives(1))
                for found in measure(centres, options):
                    rows.append({"classes": num_classes, "centres": kind, "matmul": matmul} | found)
                    _print_row(rows[-1])
    write_json(options.json, {"dim": options.dim, "neighbours": _NEIGHBOURS, "rows": rows})


def make_centres(num_classes: int, dim: int, cosine: float) -> Tensor:
    """Return (C, D) bf16 centres, in groups of 20 whose members have this cosine with each other, in a random order."""
    generator = torch.Generator().manual_seed(1)
    groups = F.normalize(torch.randn(-(-num_classes // _GROUP), dim, generator=generator))
    group = torch.randperm(num_classes, generator=generator) // _GROUP
    centres = torch.empty(num_classes, dim, dtype=torch.bfloat16)
    for low in range(0, num_classes, _BLOCK):
        rows = slice(low, min(low + _BLOCK, num_classes))
        noise = F.normalize(torch.randn(rows.stop - low, dim, generator=generator))
        centres[rows] = cosine**0.5 * groups[group[rows]] + (1 - cosine) ** 0.5 * noise
    return centres


def measure(centres: UnitCentres, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return figures of the exact search, and of the lists with each number of probes."""
    num_classes, device, k = centres.num_classes, centres.device, min(_NEIGHBOURS, centres.num_classes - 1)
    rows = torch.arange(num_classes, device=device)
    sample = rows[: min(options.sample, num_classes)]  # their order is random
    search_exact(centres, sample[:64], k)  # first calls allocate and compile
    begun = clock(device)
    truth = search_exact(centres, sample, k)
    seconds = (clock(device) - begun) * num_classes / len(sample)
    found: list[dict[str, Any]] = [{"search": "exact", "share": 1.0, "seconds": seconds, "sample": len(sample), "recall": 1.0}]
    for probes in options.probes:
        begun = clock(device)
        lists = InvertedLists(centres, seed=1)
        building = clock(device) - begun
        for low in progress(range(0, num_classes, QUERIES), -(-num_classes // QUERIES), f"{probes} probes", "pass"):
            lists.search(rows[low : low + QUERIES], k, probes)
        seconds = clock(device) - begun
        found.append(
            {
                "search": f"{min(probes, lists.num_lists)} of {lists.num_lists} lists",
                "share": lists.compared / num_classes**2,
                "seconds": seconds,
                "building_seconds": building,
                "sample": len(sample),
                "recall": float(hits(lists.search(sample, k, probes), truth).float().mean()),
            }
        )
    for row in found:
        row["gmac_per_second"] = row["share"] * num_classes**2 * options.dim / row["seconds"] / 1e9
    return found


def _print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['classes']:>9} {row['centres']:<10} {row['matmul']:<9} {row['search']:<26} {100 * row['share']:>6.2f}% "
        f"{row['seconds']:>9.1f} {row['gmac_per_second']:>8.0f} {row['recall']:>7.3f}",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
