"""The C kernels against float64 and against plain torch, and what happens where they cannot be built."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rounding import FP32_UNIT, rounding_bound
from tiny_runs import ROOT, ended_well, run_file, run_program, run_train, small_run
from torch import Tensor

from partial_fc.kernels import _why_no_triton, build_kernels, choose_kernels, why_plain
from partial_fc.kernels import cpu as cpu_kernels
from partial_fc.kernels.plain import Tile
from partial_fc.workspace import Workspace

needs_library = pytest.mark.skipif(cpu_kernels.load()[0] is None, reason="no C compiler here, so the head uses plain torch")
CPU = torch.device("cpu")
FP32_TINY = torch.finfo(torch.float32).tiny  # processors may take smaller numbers for zero


def _both(
    products: Tensor, inverse_norms: Tensor | None, begin: int, shift: float, limit: float | None
) -> list[tuple[Tensor, Tensor]]:
    """Return (E v, the sums) by C and by plain torch; columns 3 and 5 have their own class in rows 0 and 2."""
    places, results = torch.full((products.shape[1],), -1), []
    places[3], places[5], places[4] = begin, begin + 2, begin + len(products)  # column 4's is in the next chunk
    for kernels in ("c", "plain"):
        copy, sums = products.clone(), torch.ones(products.shape[1])
        tile = Tile(copy, inverse_norms, places, begin, limit)
        build_kernels(kernels, Workspace(CPU, 0)).exponentials(tile, shift, sums)
        results.append((copy, sums))
    return results


@pytest.mark.numeric
@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shift", "limit"), [(0.0, None), (7.5, None), (0.0, 20.0), (3.0, 20.0)])
@pytest.mark.parametrize(("shape", "begin", "normalised"), [((3, 6), 0, True), ((17, 300), 40, False), ((200, 513), 0, False)])
def test_exponentials_equal_float64_and_plain_torch(
    dtype: torch.dtype, shift: float, limit: float | None, shape: tuple[int, int], begin: int, normalised: bool
):
    # powers of two, so that a logit is on the same side of the limit in float64
    inverse = None if normalised else 2.0 ** (torch.arange(shape[0]) % 3 - 1)
    v = torch.ones(shape[0], 1) if inverse is None else inverse[:, None]
    products = ((30 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).clamp(-64, 64) / v).to(dtype)
    logits = products.double() * v
    expected = torch.exp(logits - shift)
    if limit is not None:
        expected[logits > limit] = 0
    expected[0, 3] = expected[2, 5] = 0
    for exp, sums in _both(products, inverse, begin, shift, limit):
        # |logit - shift| is below 128, so it is rounded by 2^-18 at most, and exp by as much of itself and four units;
        # all terms are positive, so the sums err no more, but for the rounding of their own
        fp32 = 2**-18 + 4 * FP32_UNIT
        step = fp32 if dtype == torch.float32 else fp32 + 2**-8
        torch.testing.assert_close(exp.double(), expected * v, rtol=step, atol=0)
        sum_step = fp32 + rounding_bound(torch.float32, shape[0] + 1)
        torch.testing.assert_close(sums.double(), 1 + expected.sum(dim=0), rtol=sum_step, atol=0)


@pytest.mark.numeric
@needs_library
def test_exponentials_at_the_ends_of_fp32_equal_float64():
    logits = torch.tensor([[-200.0, -87.0, 88.0, 0.0, float("-inf"), 0.0]] * 3)
    (exp, _), _ = _both(logits, None, 0, 0.0, None)
    torch.testing.assert_close(exp[1].double(), torch.exp(logits[1].double()), rtol=2**-17, atol=FP32_TINY)


@pytest.mark.numeric
def test_plain_torch_serves_where_it_is_wanted_or_nothing_else_can():
    assert choose_kernels("plain", CPU, 512) == "plain"
    assert choose_kernels("auto", CPU, 1 << 20) == "plain"  # rows too long for the stack
    assert choose_kernels("auto", CPU, 512) == ("plain" if cpu_kernels.load()[0] is None else "c")


@pytest.mark.parametrize(
    ("found", "kernels", "reason"),
    [
        ("3.5.0", "triton", ""),
        ("3.10.1+git0a", "triton", ""),
        ("3.2.0", "plain", "Triton 3.2.0 is older than 3.5; a newer torch brings a newer one"),
        (None, "plain", "Triton is not installed"),
    ],
)
def test_triton_serves_on_cuda_from_the_version_on_that_is_right(
    monkeypatch: pytest.MonkeyPatch, found: str | None, kernels: str, reason: str
):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # or a kernel would be tried
    monkeypatch.setitem(sys.modules, "triton", None if found is None else SimpleNamespace(__version__=found))
    _why_no_triton.cache_clear()
    try:
        assert choose_kernels("auto", gpu, 512) == kernels and why_plain("auto", gpu, 512) == reason
        assert choose_kernels("plain", gpu, 512) == choose_kernels("auto", gpu, 4097) == "plain"
        assert why_plain("auto", gpu, 4097) == "rows of 4097 numbers are longer than 4096"
    finally:
        _why_no_triton.cache_clear()


PROBE = "from partial_fc.kernels import cpu; print(cpu.load()[0] is not None, cpu.load()[1])"


def _probe(folder: Path, cache: Path, **environment: str) -> str:
    program = folder / "probe.py"
    program.write_text(PROBE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"XDG_CACHE_HOME": str(cache), **environment}.items():
            patch.setenv(name, value)
        done = run_program(run_file, [[str(program)]])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def quick_cc(tmp_path: Path) -> str:
    """Return a compiler that leaves out optimisations, which take seconds of each build."""
    path = tmp_path / "quick_cc"
    path.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    path.chmod(0o755)
    return str(path)


@needs_library
def test_the_library_is_built_once_and_again_if_it_is_damaged(tmp_path: Path, quick_cc: str):
    cache = tmp_path / "cache"
    assert _probe(tmp_path, cache, CC=quick_cc) == "True"
    (library,) = (cache / "face_head").iterdir()
    built = library.stat().st_mtime_ns
    assert _probe(tmp_path, cache, CC=quick_cc) == "True"
    assert library.stat().st_mtime_ns == built
    library.write_bytes(b"half a file")
    assert _probe(tmp_path, cache, CC=quick_cc) == "True"
    assert library.stat().st_size > 1000


@pytest.mark.parametrize(
    ("compiler", "reason"),  # printf: a version in Latin-1, as compilers of some locales give it
    [("false", "false cannot build them: "), ("'", "CC is no command: "), (r"printf '\374'", "cannot build them: ")],
)
def test_a_compiler_that_fails_leaves_no_library_but_the_reason(tmp_path: Path, compiler: str, reason: str):
    found = _probe(tmp_path, tmp_path, CC=compiler)
    assert found.startswith("False") and reason in found


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/nowhere/cc", "no C compiler /nowhere/cc; install gcc"), ("", "the environment variable CC is empty")],
)
def test_a_training_without_a_compiler_says_once_in_one_line_what_is_slower_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", compiler)
    run = ["data.source=synthetic", "data.path=", "data.num_classes=12", "data.num_images=16", "eval.targets=[]"]
    arguments = small_run(tmp_path, tmp_path, *run, "train.max_steps=2")
    done = ended_well(run_train(1, arguments))
    (line,) = [line for line in done.stdout.splitlines() if "steps take longer" in line]
    assert "WARNING: head: plain torch does the work of the C kernels" in line and reason in line
    if compiler == "":
        wanted = run_train(1, [*arguments, "head.kernels=plain", "run.name=wanted"])
        assert wanted.returncode == 0 and "WARNING: head" not in wanted.stdout


@needs_library
def test_a_library_of_another_instruction_set_is_not_loaded_from_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """-march=native stands for other instructions on each processor, and /proc/cpuinfo may not be there to tell them apart."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = set()
    for told in ("flags : sse2 avx2", "flags : sse2 avx2 avx512f"):
        monkeypatch.setattr(cpu_kernels, "_processor", lambda told=told: told)
        paths.add(cpu_kernels._path(["cc"], cpu_kernels._FLAGS))
    monkeypatch.setattr(cpu_kernels, "_processor", lambda: "")
    for target in sorted(instruction_sets()):
        fake = tmp_path / "fake_cc"  # a compiler on a machine where native means `target`
        fake.write_text(f'#!/bin/sh\nexec cc "$@" -march={target}\n')
        fake.chmod(0o755)
        paths.add(cpu_kernels._path([str(fake)], cpu_kernels._FLAGS))
    assert len(paths) == 2 + len(instruction_sets())


def instruction_sets() -> set[str]:
    return {"armv8-a", "armv8.2-a"} if platform.machine() == "aarch64" else {"x86-64", "x86-64-v3", "x86-64-v4"}


@needs_library
def test_a_cache_folder_that_cannot_be_made_is_replaced(tmp_path: Path, quick_cc: str):
    (tmp_path / "file").write_text("")
    assert _probe(tmp_path, tmp_path / "file", CC=quick_cc) == "True"


def test_a_user_without_home_and_name_gets_the_kernels_as_well(tmp_path: Path, quick_cc: str):
    """As a container's user that is a number: Path.home() raises RuntimeError."""
    program = "import pathlib\n"
    program += "def home(): raise RuntimeError('Could not determine home directory.')\n"
    program += "pathlib.Path.home = staticmethod(home)\n"
    program += "import torch\nfrom partial_fc.kernels import choose_kernels\n"
    program += "print(choose_kernels('auto', torch.device('cpu'), 64))"
    environment = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {"CC": quick_cc} if choose_kernels("auto", torch.device("cpu"), 64) == "c" else {}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.strip() == choose_kernels("auto", torch.device("cpu"), 64)
