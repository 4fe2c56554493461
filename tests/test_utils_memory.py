from pathlib import Path

import pytest

from utils.memory import _left_to_container

NONE = 1 << 62
GIB = 1 << 30


def _group(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'' if version == 2 else 'total_'}inactive_file {cache}\n")


@pytest.mark.parametrize(
    ("own", "groups", "left"),
    [
        ("0::/", {}, NONE),
        ("0::/job", {"job": ("max", GIB, 0)}, NONE),
        ("0::/job", {"job": (str(8 * GIB), 5 * GIB, GIB)}, 4 * GIB),  # cache is given back when memory is wanted
        ("0::/job/step", {"job": (str(8 * GIB), 5 * GIB, 0), "job/step": ("max", GIB, 0)}, 3 * GIB),  # of the group above
        ("0::/not/here", {"": (str(2 * GIB), GIB, 0)}, GIB),  # the host's path, seen from a container
        ("0::/job", {"job": (str(GIB), 2 * GIB, 0)}, 0),
        ("nonsense", {}, NONE),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, own: str, groups: dict[str, tuple[str, int, int]], left: int):
    for name, numbers in groups.items():
        _group(tmp_path / "fs" / name, *numbers)
    (tmp_path / "own").write_text(own + "\n")
    assert _left_to_container(tmp_path / "fs", tmp_path / "own") == left


def test_the_limit_of_an_older_kernel_counts(tmp_path: Path):
    _group(tmp_path / "fs" / "memory" / "docker" / "abc", str(6 * GIB), 3 * GIB, GIB, version=1)
    (tmp_path / "own").write_text("4:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n")
    assert _left_to_container(tmp_path / "fs", tmp_path / "own") == 4 * GIB
    assert _left_to_container(tmp_path / "fs", tmp_path / "nowhere") == NONE
