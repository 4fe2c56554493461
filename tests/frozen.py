"""Imported last by the server that test processes are forked from: they share its objects, which no collection touches.

What every process does at its first step, its first picture and its first configuration is done here once.
"""

import gc

import torch

from backbones import BACKBONES
from configs import load_config
from tests.tiny_runs import SHALLOW
from utils.report.contact_sheet import make_figure, png_of

BACKBONES.update(SHALLOW)
load_config("demo_cpu")
_figure = make_figure(4, 3)
_figure.subplots().semilogx([0.1, 1], [0, 1], label="ROC")
_figure.legend()
png_of(_figure)
torch.set_num_threads(1)  # a pool of threads would not survive a fork
for size, count in ((48, 4), (112, 8)):  # compiles the kernels of both sizes of tiny runs
    SHALLOW["shallow"](16, 0.125, image_size=size)(torch.zeros(count, 3, size, size)).sum().backward()
gc.freeze()
