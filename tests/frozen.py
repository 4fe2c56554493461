"""Imported last by the server that test processes are forked from: they share its objects, which no collection touches."""

import contextlib
import gc

from backbones import BACKBONES
from configs import load_config
from tests.tiny_runs import SHALLOW
from utils.report import make_figure, png_of

BACKBONES.update(SHALLOW)
load_config("demo_cpu")  # the first configuration and the first picture of a process take long
with contextlib.suppress(ImportError):  # of matplotlib
    _figure = make_figure(4, 3)
    _figure.subplots().semilogx([0.1, 1], [0, 1], label="ROC")
    _figure.legend()
    png_of(_figure)
gc.freeze()
gc.set_threshold(10_000)
