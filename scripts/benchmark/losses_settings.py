"""What each loss is trained with by scripts.benchmark.losses: its published settings, and where they come from.

The numbers are those that a paper or its authors' program trains with, on millions of photographs of tens of thousands of
people; no search was made for settings that suit the demo. Only three losses say themselves how a number follows from the
number of identities, and have that here as well: the scale of AdaCos, and the first biases of SphereFace2 and UniFace.
KappaFace refreshes its margins after each epoch, as published.
"""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/losses_settings.py is no program; python -m scripts lists them")

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from losses import margin_arguments


class Setting(NamedTuple):
    """A row of the benchmark.

    Args:
        title: for tables and pictures.
        paper: arXiv number, or venue.
        loss: `loss.name`.
        published: arguments of the loss; those that are not named have their defaults.
        is_variant: whether another row of the same loss stands for it by default.
        head: keys of the section `head` that differ from the configuration.
    """

    title: str
    paper: str
    loss: str
    published: dict[str, Any]
    is_variant: bool = False
    head: Mapping[str, Any] = MappingProxyType({})


SETTINGS: dict[str, Setting] = {
    "demo": Setting("CosFace as in the demo", "1801.09414", "cosface", {"scale": 32.0, "margin": 0.3}, True),
    "normface": Setting("NormFace", "1704.06369", "normface", {"scale": 64.0}),
    "cosface": Setting("CosFace", "1801.09414", "cosface", {"scale": 64.0, "margin": 0.4}),
    "am_softmax": Setting("AM-Softmax", "1801.05599", "cosface", {"scale": 30.0, "margin": 0.35}, True),
    "arcface": Setting("ArcFace", "1801.07698", "arcface", {"scale": 64.0, "margin": 0.5}),
    "sub_center": Setting(
        "Sub-center ArcFace, K = 3", "ECCV 2020", "arcface", {"scale": 64.0, "margin": 0.5}, head={"sub_centers": 3}
    ),
    "combined": Setting("Combined margin", "1801.07698", "combined", {"scale": 64.0, "m1": 1.0, "m2": 0.3, "m3": 0.2}),
    "sphereface": Setting("SphereFace", "1704.08063", "sphereface", {"margin": 4.0, "annealed": True}),
    "sphereface_r": Setting("SphereFace-R", "2109.05565", "sphereface_r", {"scale": 30.0, "margin": 1.7}),
    "sphereface2": Setting(
        "SphereFace2", "2108.01513", "sphereface2", {"scale": 40.0, "margin": 0.4, "t": 3.0, "balance": 0.7}
    ),
    "uniface": Setting("UniFace", "ICCV 2023", "uniface", {"scale": 64.0, "margin": 0.4, "weight": 1.0}),
    "curricularface": Setting("CurricularFace", "2004.00288", "curricularface", {"scale": 64.0, "margin": 0.5, "alpha": 0.01}),
    "mv_softmax": Setting(
        "MV-Softmax (AM)", "1912.00833", "mv_softmax", {"kind": "am", "scale": 32.0, "margin": 0.35, "t": 0.2}
    ),
    "mv_softmax_arc": Setting(
        "MV-Softmax (Arc)", "1912.00833", "mv_softmax", {"kind": "arc", "scale": 32.0, "margin": 0.5, "t": 0.2}, True
    ),
    "arcnegface": Setting("ArcNegFace", "1909.00632", "arcnegface", {"scale": 64.0, "margin": 0.5, "alpha": 1.2, "sigma": 2.0}),
    "npcface": Setting(
        "NPCFace", "2007.10172", "npcface", {"scale": 64.0, "margin": 0.5, "m0": 0.4, "m1": 0.2, "t": 1.1, "a": 0.2}
    ),
    "adacos": Setting("AdaCos", "1905.00292", "adacos", {"dynamic": True}),
    "adacos_fixed": Setting("AdaCos, fixed scale", "1905.00292", "adacos", {"dynamic": False}, True),
    "adaptiveface": Setting("AdaptiveFace", "CVPR 2019", "adaptiveface", {"scale": 30.0, "weight": 70.0}),
    "adaface": Setting("AdaFace", "2204.00964", "adaface", {"scale": 64.0, "margin": 0.4, "h": 0.333, "alpha": 0.01}),
    "magface": Setting(
        "MagFace",
        "2103.06627",
        "magface",
        {"scale": 64.0, "l_a": 10.0, "u_a": 110.0, "l_m": 0.45, "u_m": 0.8, "weight": 35.0},
    ),
    "elasticface": Setting(
        "ElasticFace-Arc",
        "2109.09416",
        "elasticface",
        {"kind": "arc", "plus": False, "scale": 64.0},
    ),
    "elasticface_arc_plus": Setting("ElasticFace-Arc+", "2109.09416", "elasticface", {"kind": "arc", "plus": True}, True),
    "elasticface_cos": Setting("ElasticFace-Cos", "2109.09416", "elasticface", {"kind": "cos", "plus": False}, True),
    "elasticface_cos_plus": Setting("ElasticFace-Cos+", "2109.09416", "elasticface", {"kind": "cos", "plus": True}, True),
    "kappaface": Setting(
        "KappaFace", "2201.07394", "kappaface", {"scale": 64.0, "margin": 0.8, "temperature": 0.4, "gamma": 0.7}
    ),
    "circle": Setting("Circle loss", "2002.10857", "circle", {"scale": 256.0, "margin": 0.25}),
    "li_arcface": Setting("Li-ArcFace", "1907.12256", "li_arcface", {"scale": 64.0, "margin": 0.45}),
    "qamface": Setting("QAMFace", "code only", "qamface", {"scale": 6.0, "margin": 0.5}),
}


def chosen_settings(names: list[str] | None) -> list[str]:
    """Return the rows that the user named; None = all but variants, ["all"] = every row.

    Raises:
        ValueError: there is no such row.
    """
    if not names:
        return [name for name, setting in SETTINGS.items() if not setting.is_variant]
    if names == ["all"]:
        return list(SETTINGS)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        raise ValueError(f"--losses must be all, or among {', '.join(SETTINGS)}; got {' '.join(names)}")
    return list(dict.fromkeys(names))


def loss_arguments(setting: Setting, epoch_steps: int) -> dict[str, Any]:
    """Return every argument of the loss, since one that is left out would keep the value of the configuration below.

    Args:
        epoch_steps: optimizer steps of an epoch, after which KappaFace refreshes its margins.
    """
    defaults = margin_arguments(setting.loss)
    return {**defaults, **({"every": epoch_steps} if "every" in defaults else {}), **setting.published}
