"""The sections of a configuration whose `name` picks a class, with the classes that there are."""

from backbones import backbone_arguments, check_backbone
from configs import NamedSection
from losses import build_margin, margin_arguments

NAMED = {"backbone": NamedSection(backbone_arguments, check_backbone), "loss": NamedSection(margin_arguments, build_margin)}
