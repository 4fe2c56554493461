"""Rules of the whole tree: who imports whom, what happens on import, and that the documents tell the truth."""

import ast
import functools
import graphlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import conftest
import pytest

from utils.program import TESTED_TORCH

ROOT = Path(__file__).parent.parent
GLUE = {"analysis", "deploy", "migration", "scripts", "training", "utils"}
LEAVES = {"backbones", "configs", "data", "eval", "losses", "partial_fc"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = {"configs/base.py", "configs/ms1mv3_r50.py", "configs/mine.yaml"}  # files of arcface_torch, and of a user
TESTS = sorted((ROOT / "tests").glob("test_*.py"))
PROGRAMS = [
    ROOT / "train.py",
    ROOT / "face_training.py",
    ROOT / "eval" / "__main__.py",
    *sorted((ROOT / "scripts").rglob("*.py")),
]
SOURCES = [
    ROOT / "train.py",
    ROOT / "face_training.py",
    *(path for name in sorted(LEAVES | GLUE) for path in (ROOT / name).rglob("*.py")),
]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(_tree(path)))


@functools.cache
def _imports(path: Path) -> set[str]:
    """Return the absolute modules that a file imports, also inside functions."""
    found = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_imports_go_one_way():
    for path in SOURCES:
        packages = {name.split(".")[0] for name in _imports(path)} & (LEAVES | GLUE | {"train"})
        home = path.relative_to(ROOT).parts[0]
        if path == ROOT / "eval" / "__main__.py":
            assert packages <= {"utils", "eval", "backbones", "data"}, path
        elif path in PROGRAMS:
            assert "train" not in packages, path
        elif home in ("deploy", "migration", "training"):
            assert packages <= LEAVES | {"utils", home}, path
        elif home == "analysis":
            assert packages <= LEAVES | {"utils", "deploy", home}, path
        elif home == "utils":
            assert packages <= {"utils"}, path
        elif home == "partial_fc":  # the type of a margin, for type checks alone
            assert packages <= {"utils", home, "losses"} and _losses_are_types(path), path
        else:
            assert packages <= {"utils", home}, path


def _losses_are_types(path: Path) -> bool:
    blocks = (node for node in _nodes(path) if isinstance(node, ast.If) and "TYPE_CHECKING" in _names(node.test))
    for_types = {inner for node in blocks for inner in ast.walk(node)}
    imports = (node for node in _nodes(path) if isinstance(node, ast.ImportFrom) and not node.level)
    return all(node in for_types for node in imports if (node.module or "").split(".")[0] == "losses")


@functools.cache
def _imported_files(path: Path) -> set[Path]:
    """Return the files of this repository that a file imports, also inside functions and for type checks."""
    places = []
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            places += [[ROOT.joinpath(*alias.name.split("."))] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (path.parents[node.level - 1] if node.level else ROOT).joinpath(*(node.module or "").split("."))
            places += [[base / alias.name, base] for alias in node.names]
    files = [[file for place in found for file in (Path(f"{place}.py"), place / "__init__.py")] for found in places]
    return {file for found in files if (file := next(filter(Path.is_file, found), None))} - {path}


def test_no_imports_run_in_a_circle():
    try:
        graphlib.TopologicalSorter({path: _imported_files(path) for path in SOURCES}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(path.relative_to(ROOT).as_posix() for path in reversed(error.args[1])))


def test_the_rooms_of_the_head_import_downwards_in_the_order_that_its_docstring_gives():
    home = ROOT / "partial_fc"
    lines = re.findall(r"^    ([a-z, /]+?)  ", ast.get_docstring(_tree(home / "__init__.py")) or "", re.M)
    floor = {room.strip(" /"): number for number, line in enumerate(lines) for room in line.split(",")}
    files = [path for path in home.rglob("*.py") if path != home / "__init__.py"]
    where = {path: floor[path.relative_to(home).parts[0].removesuffix(".py")] for path in files}
    upwards = [(path, file) for path in files for file in _imported_files(path) & set(files) if where[file] < where[path]]
    assert not upwards


def test_torch_distributed_has_few_homes():
    for path in SOURCES:
        uses = {name for name in _imports(path) if name.startswith("torch.distributed")}
        homes = r"utils/distributed/(__init__|patience|sync_norm)|partial_fc/collectives|"
        homes += r"scripts/(launch/torchrun|benchmark/arcface_torch_loop)"  # torchrun itself; no import of this project
        assert not uses or re.fullmatch(rf"({homes})\.py", path.relative_to(ROOT).as_posix()), path


def test_what_processes_are_forked_from_imports_torch_alone():
    """It begins in the folder of the user, which may have packages with the names of ours."""
    lines = [line.strip() for path in SOURCES for line in path.read_text().splitlines() if "forkserver" in line]
    assert lines == ['context = multiprocessing.get_context("forkserver")', 'context.set_forkserver_preload(["torch"])']


def test_nothing_happens_on_import():
    for path in SOURCES:
        allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
        for node in _tree(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            main = isinstance(node, ast.If) and re.search("__name__|TYPE_CHECKING", ast.unparse(node.test))
            assert isinstance(node, allowed) or docstring or main, f"{path}:{node.lineno}"


# the size of the house, in one place: what is added is paid for by everybody who comes after. Lower these when you can; the
# aim is 37,000 lines outside tests
MOST = {"lines": 44_453, "lines of tests": 42_281, "words of pages": 29_387, "lines of a file": 500, "files of a folder": 20}
SHARE_OF_SCRIPTS = 0.25


def _tracked(*kinds: str) -> list[Path]:
    """Return the tracked files of these kinds that are there."""
    listed = subprocess.run(["git", "ls-files", *kinds], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def _lines_by_file() -> dict[Path, int]:
    return {path: path.read_text().count("\n") for path in _tracked("*.py", "*.c", "*.h", "*.sh")}


def test_the_house_stays_light():
    lines = _lines_by_file()
    tests = sum(count for path, count in lines.items() if path.is_relative_to(ROOT / "tests"))
    scripts = sum(count for path, count in lines.items() if path.is_relative_to(ROOT / "scripts"))
    others = sum(lines.values()) - tests
    assert others <= MOST["lines"], f"{others} lines outside tests"
    assert tests <= MOST["lines of tests"], f"{tests} lines of tests"
    assert scripts <= SHARE_OF_SCRIPTS * others, f"{scripts} of {others} lines are in scripts"
    words = {path.name: len(path.read_text().split()) for path in PAGES if path.name != "CONTRIBUTING.md"}
    assert sum(words.values()) <= MOST["words of pages"], words


def test_files_and_folders_stay_readable():
    for path in SOURCES:
        lines = path.read_text().splitlines()
        assert len(lines) <= MOST["lines of a file"], f"{path}: {len(lines)} lines: split it"
        assert path.read_text().isascii(), path
    folders = Counter(path.parent for path in _lines_by_file() if not path.is_relative_to(ROOT / "tests"))
    losses = ROOT / "losses"  # one loss a file
    assert {folder: count for folder, count in folders.items() if count > MOST["files of a folder"] and folder != losses} == {}


def test_functions_stay_on_one_screen():
    for path in SOURCES:
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, (
                    f"{path.name}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
                )


def _public(path: Path) -> list[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Return the public functions, classes and methods of a file, by qualified name."""
    tree = _tree(path)
    found = [(node.name, node) for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for name, node in list(found):
        if isinstance(node, ast.ClassDef):
            found += [(f"{name}.{inner.name}", inner) for inner in node.body if isinstance(inner, ast.FunctionDef)]
    return [(name, node) for name, node in found if not any(part.startswith("_") for part in name.split("."))]


def test_public_names_have_a_docstring():
    """But for `main` of a program, and overrides, which have that of their base class."""
    documented = {name.split(".")[-1] for path in SOURCES for name, node in _public(path) if ast.get_docstring(node)}
    without = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name, node in _public(path)
        if not ast.get_docstring(node) and name != "main" and not ("." in name and name.split(".")[-1] in documented)
    ]
    assert not without


def _names(node: ast.AST) -> set[str]:
    found = (inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute | ast.Name))
    return {inner.attr if isinstance(inner, ast.Attribute) else inner.id for inner in found}


def _uses(node: ast.AST) -> Counter[str]:
    """Count the names that code calls, reads or hands on, also in texts such as "package.module:function"."""
    found: Counter[str] = Counter()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            found[inner.attr] += 1
        elif isinstance(inner, ast.Name):
            found[inner.id] += 1
        elif isinstance(inner, ast.alias) and inner.asname:
            found[inner.name] += 1
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            found.update(re.findall(r"(?:^[\w.]*:|; )(\w+)(?:\(\))?$", inner.value))
    return found


def _is_called_by_a_library(path: Path, name: str) -> bool:
    """Return whether a method overrides one of a base class that is not of this repository."""
    if "." not in name:
        return False
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    bases = getattr(module, name.split(".")[0]).__mro__
    ours = LEAVES | GLUE | {"train"}
    return any(hasattr(base, name.split(".")[1]) for base in bases if base.__module__.split(".")[0] not in ours)


def test_nothing_is_called_by_tests_alone():
    """What a program does not need goes, or moves into the tests that need it."""
    total = Counter(name for path in SOURCES for name in _uses(_tree(path)).elements())
    unused = [
        (path, name)
        for path in SOURCES
        for name, node in _public(path)
        if name != "main" and total[name.split(".")[-1]] == _uses(node)[name.split(".")[-1]]
    ]
    found = {f"{path.relative_to(ROOT)}: {name}" for path, name in unused if not _is_called_by_a_library(path, name)}
    assert not found


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_what_compares_tensors_up_to_rounding_is_marked_numeric(path: Path):
    """So that CI repeats it as other machines compute; what is compared through a helper of the file counts as well."""
    if not re.search("assert_close|allclose|rounding", path.read_text()):
        return
    tree = _tree(path)
    if any(isinstance(node, ast.Assign) and "pytestmark" in _names(node) and "numeric" in _names(node) for node in tree.body):
        return
    bounds = {name for name in _imports(path) if name.startswith("rounding.")}
    comparing = {"assert_close", "allclose", *(name.partition(".")[2] for name in bounds)}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    helpers = [node for node in functions if not node.name.startswith("test_")]
    while more := {node.name for node in helpers if _names(node) & comparing} - comparing:
        comparing |= more
    for node in functions:
        if node not in helpers and _names(node) & comparing:
            assert any("numeric" in _names(decorator) for decorator in node.decorator_list), f"{path.name}: {node.name}"


def test_the_list_of_utils_is_closed():
    """What is added here is seen by everybody: put it into the package that uses it, unless several do."""
    files = [path.relative_to(ROOT / "utils") for path in SOURCES if path.is_relative_to(ROOT / "utils")]
    found = {path.parts[0].removesuffix(".py") for path in files}
    packages = {"checkpoint", "distributed"}
    modules = {"alignment", "allocator", "cli", "files", "image", "log", "memory", "parallel", "program", "precision", "report"}
    assert found == packages | modules | {"machine", "optim", "randomness", "schedule", "text", "__init__"}


# what concerns several modules; everything else is named after the one it tests, or begins with its folder
TOPICS = {
    "attack_fuzz", "attack_torture",
    "configs_hostile", "data_properties", "data_sources", "data_tar_damage", "docs_data", "docs_deploy", "docs_gpu",
    "docs_losses", "docs_optimisation",
    "eval_agreement", "gpu_devices", "gpu_head", "gpu_ranks", "gpu_training", "gpu_triton", "hostile_data", "hostile_runs",
    "losses_published", "partial_fc_exactness", "partial_fc_sub_centers_state", "programs", "recipes", "repository",
    "train_agreement", "train_failures", "train_finetune", "train_hangs", "train_image_size", "train_losses", "train_resume",
    "training_tasks",
}  # fmt: skip


def test_a_test_file_has_the_name_of_the_module_or_the_room_that_it_tests():
    modules = {"_".join(part.strip("_") for part in path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
    folders = {"_".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    names = {path.stem.removeprefix("test_") for path in TESTS}
    rooms = tuple(f"{folder}_" for folder in folders - {"", "scripts", "tests"})
    assert {name for name in names - TOPICS - modules - folders if not name.startswith(rooms)} == set() and names >= TOPICS


@pytest.mark.parametrize(
    ("marks", "sees"),
    [
        ("", False), ("numeric", False), ("not gpu", False), ("gpu", True), ("gpu and not numeric", True),
        ("gpu or numeric", True),
    ],
)  # fmt: skip
def test_only_tests_marked_gpu_see_one(marks: str, sees: bool, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(pytestconfig.option, "markexpr", marks)
    conftest.pytest_configure(pytestconfig)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("0" if sees else "")


def test_every_package_is_listed_for_installation_and_the_tested_torch_is_required():
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'"(\w+)\*"', re.search(r"^include = \[(.*)\]", text, re.M).group(1))
    assert set(listed) == LEAVES | GLUE  # with the packages inside them
    assert all((path.parent / "__init__.py").is_file() for path in SOURCES if path.parent != ROOT)
    assert f"\ntorch=={TESTED_TORCH}\n" in (ROOT / "requirements.txt").read_text()


def _headings(page: Path) -> set[str]:
    """Return what links call the headings of a page."""
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", page.read_text(), re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_names_only_files_headings_and_programs_that_exist(page: Path):
    text = page.read_text()
    rooms = "|".join(sorted(LEAVES | GLUE | {"docs"}))
    named = set(re.findall(rf"\b(?:{rooms})/[\w/.-]+\.(?:py|sh|sbatch|c|md|yaml)\b", text)) - OTHERS
    assert not [name for name in named if not (ROOT / name).is_file() and "NAME" not in name]
    modules = set(re.findall(r"\bscripts(?:\.\w+)+", text))
    assert not [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()]
    for target in set(re.findall(r'(?:\]\(|src=")(?!https?:)([^)"\s]+)', text)):
        file, _, heading = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.is_file() and (not heading or heading in _headings(other)), target


TOY = '''"""CosFace under another name."""

from .cosface import CosFace
from .margin import Published


class Toy(CosFace):
    """A margin that a test adds."""

    published = (Published("toy", "Toy", "none"),)
'''
TOY_REFERENCE = '''

def toy(embeddings: Tensor, centres: Tensor, labels: Tensor, **arguments: Any) -> tuple[Tensor, State]:
    """s (cos theta_y - m)."""
    return cosface(embeddings, centres, labels, **arguments)
'''


def test_a_new_margin_touches_four_files(tmp_path: Path):
    """Its class, its line, its reference and its case: then all tests of margins try it, and a program writes its row."""
    for path in _tracked():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(path) if path.suffix == ".png" else shutil.copy(path, copy)
    (tmp_path / "losses" / "toy.py").write_text(TOY)
    for file, before, after in (
        ("losses/__init__.py", "from .uniface", "from .toy import Toy\nfrom .uniface"),
        ("losses/__init__.py", "LiArcFace, QAMFace)", "LiArcFace, QAMFace, Toy)"),
        ("tests/loss_references.py", None, TOY_REFERENCE),
        ("tests/loss_cases.py", '    "uniface": _same', '    "toy": _same(loss_references.toy, 1.0),\n    "uniface": _same'),
        ("tests/loss_cases.py", "import torch\n", "import loss_references\nimport torch\n"),
        ("tests/conftest.py", "forkserver.ensure_running()", "pass"),  # none of these tests needs it
    ):
        text = (tmp_path / file).read_text()
        (tmp_path / file).write_text(text + after if before is None else text.replace(before, after, 1))
    tests = "losses losses_margin losses_first_loss docs_losses partial_fc_softmax_loss scripts_benchmark_losses_curves"
    files = [f"tests/test_{name}.py" for name in tests.split()]
    chosen = "toy or every_loss_has_a_case or made_from_the_classes or no_global_random"
    both = "import pytest\nfrom scripts import tables\nexit(tables.main(['docs/losses.md']) or pytest.main())"
    arguments = [sys.executable, "-c", both, "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *files]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(re.findall(r"\.", done.stdout.splitlines()[0])) > 20
    row = "| `toy` | A margin that a test adds | `scale=64.0` `margin=0.4` | Toy (none) |"
    assert row in (tmp_path / "docs/losses.md").read_text()


def test_no_large_file_is_tracked():
    assert not [path for path in _tracked() if path.stat().st_size > 500_000]
