"""The report of scripts.benchmark.gpu: what ran and what failed, a table of each part, and pictures."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/page.py is no program; python -m scripts lists them")

from pathlib import Path
from typing import Any

from utils.report.figure import make_figure, png_of
from utils.report.page import Page

from .measuring import Row

_MARKERS = {"exact": "o", "lean": "s", "tiny": "^"}
_USUAL = {"cache_mb": -1, "chunk": 0, "kernels": "auto"}  # not said in the legend
_SHOWN_LANES = 8
# of the bars of a timeline: parts of the names of operators and kernels, the first match counts; and a colour
_KINDS = {
    "convolutions": (("conv", "fprop", "dgrad", "wgrad"), "tab:blue"),
    "BatchNorm": (("norm", "bn_"), "tab:orange"),
    "PReLU": (("prelu",), "tab:green"),
    "head": (("exp_mask", "sgd_update", "adamw_update", "readygradient"), "tab:red"),
    "products": (("mm", "nvjet", "cutlass"), "tab:brown"),
    "copies": (("copy", "memcpy", "memset", "fill"), "tab:gray"),
    "others": (("",), "tab:purple"),
}


def write(result: dict[str, Any], path: Path) -> None:
    """Write the page of a result, as scripts.benchmark.gpu keeps it in its JSON."""
    page = Page("One GPU in ten minutes" if result["device"] == "cuda" else "The benchmark of one GPU, on a CPU")
    versions: Row = next((row for row in _rows(result, "machine") if row.get("what") == "versions"), {})
    page.facts([("begun", result["begun"]), *((name, _text(value)) for name, value in versions.items() if name != "what")])
    if result["device"] == "cpu":
        page.text("Measured on a CPU: no figure here says anything about a GPU. What only CUDA can tell is left out.")
    parts = result["parts"]
    page.table(
        ["part", "how it ended", "seconds", "reason"],
        [[name, part["status"], f"{part['seconds']:.1f}", part["reason"]] for name, part in parts.items()],
    )
    page.contents()
    for name, part in parts.items():
        page.section(name)
        if part["last_lines"]:
            page.text(f"{part['status']}. Its last lines:")
            for line in part["last_lines"]:
                page.text(line, note=True)
        if name in _PICTURES:
            _PICTURES[name](page, [row for row in part["rows"] if not {"failed", "left_out"} & set(row)])
        _tables(page, _counted(part["rows"]) if name == "tests" else part["rows"])
    page.write(path)


def _rows(result: dict[str, Any], part: str) -> list[Row]:
    rows: list[Row] = result["parts"].get(part, {}).get("rows", [])
    return rows


def _text(value: object) -> str:
    """Return a value as text, numbers with four digits."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _tables(page: Page, rows: list[Row]) -> None:
    """Add a table of the rows of each kind: those that begin with the same column."""
    rows = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    rows = [row for row in rows if row.get("what") != "versions"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row["what"]) if "what" in row and len(row) > 4 else next(iter(row)), []).append(row)
    for group in groups.values():
        names = list(dict.fromkeys(name for row in group for name in row))
        page.table([name.replace("_", " ") for name in names], [[_text(row.get(name, "-")) for name in names] for row in group])


def _counted(rows: list[Row]) -> list[Row]:
    """Return a row per outcome and reason of the tests, and one for each that failed."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        reason = row.get("reason", "") or (f"{row['test']}: {row['failed']}" if "failed" in row else "")
        groups.setdefault((row["outcome"], reason), []).append(row)
    return [
        {"outcome": outcome, "tests": len(group), "seconds": sum(row["seconds"] for row in group), "reason": reason}
        for (outcome, reason), group in groups.items()
    ]


def _roofline(page: Page, rows: list[Row]) -> None:
    cases = [row for row in rows if "useful_tflops" in row]
    limits = next((row for row in rows if row.get("what") == "limits"), None)
    if not cases or limits is None:
        return
    figure = make_figure(9, 4.6, layout="constrained")
    axes = figure.add_subplot()
    ends = [min(row["flops_per_byte"] for row in cases) / 3, max(row["flops_per_byte"] for row in cases) * 3]
    for name, style in (("bf16", "-"), ("fp32", "--")):
        top = limits[f"TFLOP/s of {name}"]
        places = [ends[0], 1e3 * top / limits["GB/s"], ends[1]]
        roof = [min(top, place * limits["GB/s"] / 1e3) for place in places]
        axes.plot(places, roof, style, color="gray", label=f"limit, {name}: {top:.3g} TFLOP/s")
    for row in cases:
        label = f"{row['classes']:,} {row['storage']} {row['matmul']}, rate {row['sample_rate']:g}, batch {row['batch']}"
        others = [name for name in _USUAL if row[name] != _USUAL[name]]
        label += "".join(f", {name} {row[name]}" for name in others)
        axes.plot(row["flops_per_byte"], row["useful_tflops"], _MARKERS[row["storage"]], label=label)
    axes.set(xscale="log", yscale="log", xlabel="useful operations per byte that must be moved", ylabel="useful TFLOP/s")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    page.picture(png_of(figure), "Roofline of the head: limits are the bare products and copies of this run")


def _images_per_second(page: Page, rows: list[Row]) -> None:
    names = ("backbone", "batch", "precision", "mode")
    cases = [row for row in rows if "images_per_second" in row]
    if not cases:
        return
    figure = make_figure(9, 1 + 0.24 * len(cases), layout="constrained")
    axes = figure.add_subplot()
    labels = [" ".join(str(row[name]) for name in names if name in row) for row in cases]
    axes.barh(range(len(cases)), [row["images_per_second"] for row in cases], color="tab:blue")
    axes.set_yticks(range(len(cases)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="images/s")
    axes.grid(True, axis="x", alpha=0.25)
    page.picture(png_of(figure), "Images per second")


def _timeline(page: Page, rows: list[Row]) -> None:
    _images_per_second(page, rows)
    for row in rows:
        intervals = row.get("timeline", [])
        if not intervals:
            continue
        lanes = sorted({lane for lane, *_ in intervals})[:_SHOWN_LANES]
        figure = make_figure(11, 1.2 + 0.5 * len(lanes), layout="constrained")
        axes = figure.add_subplot()
        for kind, (_, colour) in _KINDS.items():
            for number, lane in enumerate(lanes):
                found = [
                    (low / 1e3, (high - low) / 1e3) for at, name, low, high in intervals if at == lane and _kind(name) == kind
                ]
                axes.broken_barh(found, (number - 0.4, 0.8), facecolors=colour, label=kind if number == 0 else None)
        axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
        axes.set(xlabel="milliseconds")
        axes.invert_yaxis()
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        words = f"{row['backbone']}, {row['classes']:,} classes, batch {row['batch']}"
        page.picture(png_of(figure), f"{row['steps']} steps of a training under the profiler: {words}")


def _kind(name: str) -> str:
    """Return what an operator or a kernel of this name is for."""
    return next(kind for kind, (parts, _) in _KINDS.items() if any(part in name.lower() for part in parts))


def _loader(page: Page, rows: list[Row]) -> None:
    cases = [row for row in rows if row.get("threads")]
    if not cases:
        return
    figure = make_figure(6.5, 3.6, layout="constrained")
    axes = figure.add_subplot()
    threads = [row["threads"] for row in cases]
    axes.plot(threads, [row["images_per_second"] for row in cases], "o-", color="tab:blue")
    axes.set(xlabel="decoder threads", ylabel="images/s", ylim=(0, 1.1 * max(row["images_per_second"] for row in cases)))
    other = axes.twinx()
    other.plot(threads, [row["launches_of_alone"] for row in cases], "s--", color="tab:orange")
    other.set(ylabel="launches per second, as a share of those without a loader")
    other.set_ylim(0, 1.1 * max(row["launches_of_alone"] for row in cases))
    other.yaxis.label.set_size(8)
    axes.grid(True, alpha=0.25)
    page.picture(png_of(figure), "The loader (solid) beside a main thread that launches work (dashed)")


def _saves(page: Page, rows: list[Row]) -> None:
    if not rows:
        return
    figure = make_figure(6.5, 2.4, layout="constrained")
    axes = figure.add_subplot()
    for number, row in enumerate(rows):
        axes.barh(number, row["complete_after_s"], color="0.8", label="written beside training" if number == 0 else None)
        axes.barh(number, row["training_waits_s"], color="tab:red", label="training waits" if number == 0 else None)
    axes.set_yticks(range(len(rows)), [f"{row['save']} save" for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel=f"seconds, {rows[0]['gib']:.3g} GiB")
    axes.legend(fontsize=8)
    page.picture(png_of(figure), "Saves of a head")


_PICTURES = {
    "head": _roofline,
    "backbone": _images_per_second,
    "training": _timeline,
    "loader": _loader,
    "checkpoint": _saves,
}
