"""The real timm for tests, where it is installed; without torchvision, which it imports and no network here uses."""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_TORCHVISION = '''"""Stands in for torchvision: any module of it, in which any name is an empty class."""

import importlib.abc
import importlib.machinery
import sys


class Name(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = lambda name: getattr(Name("", (), {}), name)


__version__ = "0.0"
sys.meta_path.append(Finder())
from torchvision import transforms
'''


@pytest.fixture(scope="module")
def timm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return timm, and forget it at the end, for tests with a stand-in. Processes started meanwhile find it, too."""
    try:
        importlib.metadata.version("timm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("timm is not installed: pip install --no-deps timm huggingface_hub")
    _forget()
    before = list(sys.path)
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        folder = tmp_path_factory.mktemp("stand_in") / "torchvision"
        folder.mkdir()
        (folder / "__init__.py").write_text(_TORCHVISION)
        sys.path.insert(0, str(folder.parent))
    yield importlib.import_module("timm")
    sys.path[:] = before
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "torchvision"]
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]:
        del sys.modules[name]
