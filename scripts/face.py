"""Start a program by its verb: `face VERB ...` runs the main() of a module with the other arguments.

Without a verb: examples, then all verbs by purpose. No program is imported for that, so it is quick.
"""

if __name__ == "__main__":
    raise SystemExit("error: scripts/face.py is no program of its own: start ./face in the root of the clone")

import ast
import importlib
import sys
from pathlib import Path

from utils.cli import leave_closed_output
from utils.text import did_you_mean

_ROOT = Path(__file__).parents[1]
_EXAMPLES = """\
face train ms1mv3_r50 data.path=/data/ms1m optimizer.lr=0.05      a configuration of configs/, or a path
face eval work_dirs/ms1mv3_r50 --targets lfw cfp_fp agedb_30      accuracy, ROC and thresholds
face data inspect /data/mine --out report                         what is in a set, and what is wrong with it
face export work_dirs/ms1mv3_r50 --to onnx --out r50.onnx         a file for other programs
face doctor                                                       what this machine has, and what is missing\
"""
# purpose -> verb -> module. A folder that ends in `.` has a verb for each program in it
VERBS: dict[str, dict[str, str]] = {
    "Train and score": {
        "train": "scripts.launch.train",
        "eval": "eval.__main__",
        "compare": "scripts.eval.compare_runs",
        "checkpoint": "scripts.checkpoint",
    },
    "Use a network": {
        verb: f"scripts.deploy.{verb}"
        for verb in ("detect", "embed", "enrol", "search", "verify", "gallery", "adapt", "serve", "export", "card")
    },
    "Know your data and your network": {
        verb: f"scripts.analysis.{verb}" for verb in ("clean", "cluster", "groups", "pairs", "quality", "robustness")
    },
    "Make, check and change sets": {"data": "scripts.data.", "demo_data": "scripts.demo.make_data"},
    "Move from and to arcface_torch": {
        "migrate config": "scripts.arcface_torch.import_config",
        "migrate checkpoint": "scripts.arcface_torch.import_checkpoint",
        "migrate export": "scripts.arcface_torch.export_checkpoint",
    },
    "Look at this machine": {"doctor": "scripts.doctor", "bench": "scripts.benchmark."},
}


def main(arguments: list[str] | None = None) -> int:
    """Run the program that the first words name; return its exit status."""
    try:
        return _start(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError as error:  # of what needs no torch, and so has no run_main
        return leave_closed_output(error)


def _start(words: list[str]) -> int:
    verbs = all_verbs()
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(verbs), flush=True)
        return 0
    for count in (2, 1):
        verb = " ".join(words[:count])
        if verb in verbs:
            return _run(verbs[verb], words[count:])
    group = [name for name in verbs if name.startswith(f"{words[0]} ")]
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print("\n".join(_lines({name: verbs[name] for name in group})), flush=True)
        return 0
    near = did_you_mean(verb, verbs) or did_you_mean(" ".join(words[:2]), verbs)
    if group:
        names = ", ".join(name.partition(" ")[2] for name in group)
        print(f"error: face {words[0]} {words[1]}: no such program.{near} There are {names}", file=sys.stderr)
    else:
        print(f"error: face {words[0]}: no such verb.{near} `face` alone lists them", file=sys.stderr)
    return 2


def all_verbs() -> dict[str, str]:
    """Return verb -> module of all programs, as in VERBS, with those of the folders."""
    found: dict[str, str] = {}
    for verb, module in (item for group in VERBS.values() for item in group.items()):
        if module.endswith("."):
            paths = sorted(_ROOT.joinpath(*module.split(".")[:-1]).glob("*.py"))
            found |= {f"{verb} {path.stem}": f"{module}{path.stem}" for path in paths if "run_main(" in path.read_text("utf-8")}
        else:
            found[verb] = module
    return found


def _run(module: str, arguments: list[str]) -> int:
    """Import a program and run it; return its exit status."""
    try:
        program = importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if (_ROOT / package).exists() or (_ROOT / f"{package}.py").exists():
            raise
        print(
            f"error: {sys.executable} has no package {package}. `bash scripts/quickstart.sh` makes an environment in .venv, "
            "which `face` uses; in one of your own: pip install -r requirements.txt",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:  # a second or two, while torch is imported
        return 130
    return int(program.main(arguments))


def _overview(verbs: dict[str, str]) -> str:
    """Return the examples, and the verbs by purpose."""
    parts = [_EXAMPLES]
    for purpose, group in VERBS.items():
        lines = []
        for verb in group:
            inside = {name: verbs[name] for name in verbs if name == verb or name.startswith(f"{verb} ")}
            if verb == "bench":
                names = " ".join(name.partition(" ")[2] for name in inside)
                lines += [f"{'face bench NAME':<32} Measure a part against plain baselines. NAME:", f"    {names}"]
            else:
                lines += _lines(inside)
        parts.append("\n  ".join([purpose, *lines]))
    parts.append("`face VERB --help` explains a program. Each is also a module, such as python -m scripts.data.inspect.")
    return "\n\n".join(parts)


def _lines(verbs: dict[str, str]) -> list[str]:
    """Return a line for each verb, with the purpose from the first line of the program's docstring."""
    lines = []
    for verb, module in verbs.items():
        path = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
        first = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]
        lines.append(f"{f'face {verb}':<32} {first.partition(': ')[0].partition(' face ')[0].rstrip('.:')}")
    return lines
