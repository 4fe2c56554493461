"""Say what this machine has for training, and what is missing: face doctor

Reports processor, cores, memory, GPU, Python, the packages against requirements.txt, the C compiler of the head's kernels,
what each missing optional package would add, and the newest run. Exit status 0 if training can run, 1 if not. Changes nothing.

Example: face doctor --runs work_dirs
"""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from utils.cli import make_parser
from utils.machine import left_to_container, num_cores
from utils.text import pip_install

_ROOT = Path(__file__).parents[1]
_UNITS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bf16 AVX-512", "amx_bf16": "bf16 AMX"}
_IMPORTED = {"opencv-python-headless": "cv2", "scikit-learn": "sklearn", "PyYAML": "yaml"}  # package -> module, if not the same


class Pin(NamedTuple):
    """A line of a requirements file that concerns this Python."""

    package: str
    version: str
    purpose: str  # its comment


def main(arguments: list[str] | None = None) -> int:
    # not run_main: it needs torch, and this program says whether that is there
    parser = make_parser("face doctor", __doc__)
    parser.add_argument("--runs", type=Path, default=Path("work_dirs"), metavar="DIR", help="folder of run folders")
    options = parser.parse_args(arguments)
    faults = []
    print(f"{'processor':<23}{processor()}")
    print(f"{'cores':<23}{cores()}")
    print(f"{'memory':<23}{memory()}")
    print(f"{'GPU':<23}{gpu()}")
    print(f"{'Python':<23}{platform.python_version()}, {sys.executable}")
    for pin in read_pins(_ROOT / "requirements.txt"):
        fault, note = check_package(pin)
        if pin.package == "torch" or fault or note:
            print(f"{pin.package:<23}{fault or note or pin.version}")
        faults += [f"{pin.package} is {fault.partition(';')[0]}"] if fault else []
    print(f"{'C compiler':<23}{compiler()}")
    for pin in read_pins(_ROOT / "requirements-optional.txt"):
        if _installed(pin.package) is None:
            print(f"{'optional':<23}no {pin.package}: {pin.purpose}. {pip_install(f'{pin.package}=={pin.version}')}")
    print(f"{'newest run':<23}{newest_run(options.runs)}")
    if not faults:
        print("\ntraining can run")
        return 0
    print(f"\ntraining cannot run: {', '.join(faults)}. `bash scripts/quickstart.sh` makes an environment in .venv")
    return 1


def processor() -> str:
    """Return the processor's model and those of its units that make training faster."""
    text = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", text, re.M)
    flags = re.search(r"^flags\s*: (.*)$", text, re.M)
    units = [name for flag, name in _UNITS.items() if flags and flag in flags[1].split()]
    slow = "" if any("bf16" in name for name in units) else "; no bf16 units, so fp32 is faster here"
    return f"{model[1] if model else platform.processor() or platform.machine()}: {', '.join(units) or 'units unknown'}{slow}"


def cores() -> str:
    """Return how many cores this process may use, within the limits of control groups, and how busy the machine is."""
    total = os.cpu_count() or 1
    mine, busy = num_cores(), os.getloadavg()[0]
    return f"{mine} of {total}; load {busy:.1f}{', so timings will suffer' if busy > mine / 2 else ''}"


def memory() -> str:
    """Return free and total memory, the free one within the limits of control groups."""
    found = {key: int(value) / 2**20 for key, value in re.findall(r"^(Mem\w+): +(\d+) kB$", _read("/proc/meminfo"), re.M)}
    free = min(found.get("MemAvailable", 0), left_to_container() / 2**30)
    return f"{free:.1f} GiB free of {found['MemTotal']:.1f}" if "MemAvailable" in found else "unknown"


def gpu() -> str:
    """Return the GPUs with their driver, and whether torch sees them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    lines = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
    if not lines:
        return "none with a driver; training runs on the CPU"
    with contextlib.suppress(Exception):  # a torch that cannot be imported has a line of its own
        seen = importlib.import_module("torch").cuda.device_count()
        lines.append(f"torch sees {seen}" + ("" if seen else ": it is a build for CPUs, or does not fit the driver"))
    return "; ".join(lines)


def read_pins(path: Path) -> Iterator[Pin]:
    """Yield the pinned packages of a requirements file, for this version of Python."""
    purposes: dict[str, str] = {}
    for line in _read(path).splitlines():
        found = re.match(r'([\w.-]+)==([\w.]+)\s*(?:; python_version (>=|<) "3\.(\d+)")?\s*(?:#\s*(.*))?$', line)
        if found and found[5]:
            purposes[found[1]] = found[5]
        if found and (not found[3] or (sys.version_info[1] >= int(found[4])) == (found[3] == ">=")):
            yield Pin(found[1], found[2], purposes.get(found[1], "goes with the others here"))


def check_package(pin: Pin) -> tuple[str, str]:
    """Return (what is wrong with a package so that training cannot run, what else is to be said of it)."""
    version = _installed(pin.package)
    try:
        importlib.import_module(_IMPORTED.get(pin.package, pin.package))
    except Exception as error:  # of a damaged installation, anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = "missing" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({reason})"
        return f"{what}; {pip_install(f'{pin.package}=={pin.version}')}", ""
    return "", "" if str(version).partition("+")[0] == pin.version else f"{version}, but the tests run with {pin.version}"


def compiler() -> str:
    """Return the C compiler that partial_fc/kernels uses, or what goes without one."""
    with contextlib.suppress(ValueError, IndexError, OSError, subprocess.SubprocessError):
        words = shlex.split(os.environ.get("CC", "cc"))
        if shutil.which(words[0]):
            done = subprocess.run([*words, "--version"], capture_output=True, errors="replace", timeout=30)
            return (done.stdout.splitlines() or [words[0]])[0]
    return "none: the head computes in plain torch, which is slower; install gcc"


def newest_run(folder: Path) -> str:
    """Return the run that was written to last, with its newest checkpoint."""
    runs = sorted(folder.glob("*/config.yaml"), key=lambda path: path.parent.stat().st_mtime)
    if not runs:
        return f"none in {folder}"
    steps = sorted(path.parent.name for path in runs[-1].parent.glob("checkpoints/step_*/manifest.json"))
    return f"{runs[-1].parent}, {steps[-1] if steps else 'no checkpoint'}"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: str | Path) -> str:
    """Return the text of a file, "" if it cannot be read."""
    try:
        return Path(path).read_text("utf-8", errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    raise SystemExit(main())
