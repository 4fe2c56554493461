"""What published programs compute on fixed inputs: losses, gradients, and states.

Each program ran in a process of its own, in float64, on the inputs of `make_inputs`: the loss and its gradients in one step,
without an optimizer. The numbers are what it returned, the commit is that of its repository on GitHub. Here stand only cases
in which program and paper agree; they may disagree beyond theta + m = pi, where programs clip, and in margins that they
switch off for small cosines.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from loss_references import arcface, circle, combined, cosface, li_arcface, normface, qamface, sphereface, sphereface_r
from loss_references_adaptive import adacos, adaface, arcnegface, curricularface, magface, mv_softmax, npcface
from loss_references_other import adaptiveface, elasticface, kappaface, sphereface2, uniface
from torch import Tensor

NUM_CLASSES, DIM = 12, 16
LABELS = [3, 0, 7, 3, 11, 5, 0, 9]
NORMS = [24.0, 6.0, 105.0, 12.0, 40.0, 118.0, 18.0, 70.0]
COSINES = {  # of the embeddings and the centres of their classes
    "easy": [0.7, 0.42, 0.95, 0.5, 0.85, 0.6, 0.9, 0.8],
    "mixed": [0.3, -0.6, 0.95, -0.3, 0.1, -0.05, 0.75, 0.5],
    "beyond": [-0.98, -0.95, -0.92, -0.5, 0.05, 0.3, 0.6, 0.9],  # theta + 0.5 > pi in three samples
}


def _uniform(count: int, seed: int) -> list[float]:
    """Return numbers in [-0.5, 0.5) from a linear congruential generator (Numerical Recipes), the same everywhere."""
    values = []
    for _ in range(count):
        seed = (1664525 * seed + 1013904223) % 2**32
        values.append(seed / 2**32 - 0.5)
    return values


def _unit(vector: list[float]) -> list[float]:
    length = math.sqrt(math.fsum(a * a for a in vector))
    return [a / length for a in vector]


def make_inputs(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings (8, 16), centres (12, 16), both fp32 rounded from float64, and labels (8,).

    An embedding is norm (c u + sqrt(1 - c^2) n) with u the unit centre of its class and n a unit vector orthogonal to it.
    """
    w, noise = _uniform(NUM_CLASSES * DIM, 1), _uniform(len(LABELS) * DIM, 2)
    centres = [w[DIM * j : DIM * (j + 1)] for j in range(NUM_CLASSES)]
    embeddings = []
    for i, (y, norm, c) in enumerate(zip(LABELS, NORMS, COSINES[name], strict=True)):
        u, n = _unit(centres[y]), noise[DIM * i : DIM * (i + 1)]
        along = math.fsum(a * b for a, b in zip(n, u, strict=True))
        n = _unit([a - along * b for a, b in zip(n, u, strict=True)])
        embeddings.append([norm * (c * a + math.sqrt(1 - c * c) * b) for a, b in zip(u, n, strict=True)])
    return torch.tensor(embeddings), torch.tensor(centres), torch.tensor(LABELS)


def _classes(active: list[int]) -> Tensor:
    mask = torch.zeros(NUM_CLASSES, dtype=torch.bool)
    mask[active] = True
    return mask


def _double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


DRAWS = _double([0.45, 0.52, 0.38, 0.6, 0.49, 0.55, 0.41, 0.5])
MARGINS = torch.linspace(0.1, 0.65, NUM_CLASSES, dtype=torch.float64).requires_grad_()
SPHEREFACE2_BIAS = _double([12.687813611033828]).requires_grad_()
UNIFACE_BIAS = _double([4.787491798400879]).requires_grad_()
KAPPA_LENGTHS = _double([
    0.392311493, 0.41449445, 0.489267495, 0.52104384, 0.514375517, 0.589601765,
    0.671493608, 0.721752734, 0.709019994, 0.804150601, 0.803684563, 0.806941911,
])  # fmt: skip
KAPPA_SIZES = torch.tensor([5, 9, 14, 3, 30, 8, 12, 7, 22, 10, 4, 18])
KAPPA_PSI = _double([
    0.707743363, 0.665988015, 0.584687618, 0.694970555, 0.404848326, 0.637919598,
    0.556608225, 0.58892873, 0.394346355, 0.482946657, 0.540336805, 0.364845111,
])  # fmt: skip
KAPPA = {"psi": KAPPA_PSI, "sums": torch.zeros(NUM_CLASSES, DIM), "counts": torch.zeros(NUM_CLASSES)}


class Published(NamedTuple):
    """A case: the loss as a reference, the program, and for each input its numbers.

    They are: the loss, the norm of the embeddings' gradient, its element (1, 5), the norm of the centres' gradient, its
    element (3, 7), and what `more` names: the norm of a learnable parameter's gradient, or a state after the step. None:
    the program has the gradient for unit centres, before it normalises.
    """

    loss: Callable
    source: str
    numbers: dict[str, tuple[float | None, ...]]
    more: tuple[str, ...] = ()


PUBLISHED = [
    Published(partial(normface, scale=30.0), "ydwen/opensphere at a679e820, opensphere/module/head/cocoloss.py", {
        "easy": (0.574986248, 0.756884979, 0.21996777, None, None),
        "mixed": (10.6416474, 0.968617804, 0.0430198638, None, None),
        "beyond": (22.556781, 0.593047629, 0.0151884367, None, None),
    }),
    Published(partial(cosface), "Tencent/TFace at 171ec143, recognition/torchkit/head/localfc/cosface.py", {
        "easy": (11.5314129, 1.92095167, 0.476131469, 17.5634771, 0.827343885),
        "mixed": (40.3049333, 2.0776727, 0.0917951516, 21.5099874, 0.930962117),
        "beyond": (67.3049288, 1.30056295, 0.0324010397, 19.0522231, 0.766900179),
    }),
    Published(partial(cosface, active=_classes([0, 1, 3, 4, 5, 7, 9, 11])),
              "deepinsight/insightface at 7fadd420, recognition/arcface_torch/partial_fc_v2.py, sample rate 0.7", {
        "easy": (10.3238032, 1.92637166, 0.476131469, 17.0244898, 0.820308298),
    }),
    Published(partial(arcface), "Tencent/TFace at 171ec143, recognition/torchkit/head/localfc/arcface.py", {
        "easy": (12.9926495, 2.04486987, 0.496444228, 19.0927458, 0.971252305),
        "mixed": (41.8876719, 1.65315004, 0.0857855793, 19.5031599, 0.710384798),
        "beyond": (64.8991062, 1.32795027, 0.0324010397, 19.8528917, 0.470064381),
    }),
    Published(partial(arcface, straight_through=True),
              "deepinsight/insightface at 7fadd420, recognition/arcface_torch/losses.py and partial_fc_v2.py", {
        "easy": (12.9926495, 1.92005678, 0.476131469, 17.494986, 0.827344284),
    }),
    Published(partial(combined, m2=0.3, m3=0.2), "cavalleria/cavaface at 822651f0, head/metrics.py", {
        "easy": (13.2597829, 2.02869909, 0.494941693, 18.4208422, 0.941528161),
        "mixed": (43.4129146, 1.83982666, 0.0884747872, 20.5199609, 0.823666332),
    }),
    Published(partial(sphereface, steps=9999), "cavalleria/cavaface at 822651f0, head/metrics.py", {
        "easy": (3.64230973, 0.332807194, 0.0494537318, 17.4031805, 0.227980626),
        "mixed": (23.5841779, 0.548500419, 0.0446913033, 19.9655979, 0.290393457),
        "beyond": (55.5202193, 0.701956699, 0.040875661, 26.1750565, 0.237209834),
    }),
    Published(partial(sphereface_r), "ydwen/opensphere at a679e820, opensphere/module/head/sphereface.py", {
        "easy": (8.83834739, 0.899305776, 0.223183063, None, None),
        "mixed": (27.1180074, 0.971305167, 0.0430198638, None, None),
        "beyond": (45.0934377, 0.631666103, 0.0151884367, None, None),
    }),
    Published(partial(circle), "JDAI-CV/FaceX-Zoo at 16b793a7, head/CircleLoss.py", {
        "easy": (50.9678722, 6.10683617, 1.55993071, 53.431357, 2.41499825),
        "mixed": (242.895455, 11.2377168, 0.365662125, 91.9030058, 5.5033406),
        "beyond": (514.681805, 6.66070382, -0.0644744604, 81.2175952, 5.41322027),
    }),
    Published(partial(li_arcface), "cavalleria/cavaface at 822651f0, head/metrics.py", {
        "easy": (7.73363567, 1.40944949, 0.35234185, 13.0063655, 0.621245991),
        "mixed": (27.6023014, 1.62189287, 0.0737538419, 14.8940561, 0.621362817),
        "beyond": (50.4561904, 1.36355262, -0.0125301993, 16.2501837, 0.621312413),
    }),
    Published(partial(qamface), "cavalleria/cavaface at 822651f0, head/metrics.py", {
        "easy": (12.8763033, 2.07135345, 0.522875904, 19.3447891, 0.872148038),
        "mixed": (39.4688851, 2.16539956, 0.111394698, 20.5126898, 0.728452935),
        "beyond": (65.9080632, 1.84089456, 0.0421759344, 22.3292702, 0.656357734),
    }),
    Published(partial(curricularface, t=0.3), "HuangYG123/CurricularFace at 68c8727f, head/metrics.py", {
        "easy": (9.88585904, 2.39116025, 0.612233797, 21.7761458, 0.971182823, 0.30415),
        "mixed": (37.1495392, 2.19216987, 0.127217243, 21.4919338, 0.710877908, 0.2990625),
        "beyond": (60.9660969, 1.85027537, 0.089602042, 21.8307528, 0.470117179, 0.295125),
    }, ("t",)),
    Published(partial(curricularface, t=0.3, alpha=0.1),
              "Tencent/TFace at 171ec143, recognition/torchkit/head/distfc/curricularface.py", {
        "mixed": (36.9809929, 2.1824547, 0.126547923, 21.404126, 0.710943244, 0.290625001),
    }, ("t",)),
    Published(partial(mv_softmax), "cavalleria/cavaface at 822651f0, head/metrics.py, SVXSoftmax", {
        "easy": (10.8748203, 1.05507079, 0.265255554, 9.75909184, 0.413675006),
        "mixed": (26.9479021, 1.13899959, 0.0538295637, 11.56783, 0.465539842),
        "beyond": (39.6595968, 0.729831682, 0.023461708, 10.4029066, 0.383501478),
    }),
    Published(partial(mv_softmax, kind="arc"), "cavalleria/cavaface at 822651f0, head/metrics.py, SVXSoftmax", {
        "easy": (8.9695397, 1.10854554, 0.275269527, 10.2365277, 0.476275138),
        "mixed": (24.8188484, 1.00205942, 0.0518483406, 10.8568903, 0.399193363),
    }),
    Published(partial(arcnegface), "JDAI-CV/FaceX-Zoo at 16b793a7, head/ArcNegFace.py", {
        "easy": (20.0777008, 2.07379922, 0.492516436, 23.0220611, 0.971254283),
        "mixed": (32.9225536, 1.26271302, -0.0708819177, 21.4103946, 0.702487118),
        "beyond": (37.3034562, 0.91612944, -0.0825933552, 17.5749438, 0.465583829),
    }),
    Published(partial(npcface), "JDAI-CV/FaceX-Zoo at 16b793a7, head/NPCFace.py", {
        "easy": (19.7584953, 2.13335095, 0.524095512, 19.9798679, 0.96761889),
    }),
    Published(partial(adacos), "JDAI-CV/FaceX-Zoo at 16b793a7, head/AdaCos.py", {
        "easy": (0.884215753, 0.0636377146, 0.0110784039, 0.511537088, 0.036679865, 3.35055832),
        "mixed": (2.3619206, 0.0976035983, 7.85321459e-05, 0.952399447, 0.0622026438, 3.87740843),
        "beyond": (3.88996053, 0.0604374299, -0.00329838638, 0.850347261, 0.0518084792, 3.95648074),
    }, ("scale",)),
    Published(partial(adaptiveface, margins=MARGINS), "JDAI-CV/FaceX-Zoo at 16b793a7, head/AdaM_Softmax.py", {
        "easy": (47.2238143, 0.894182615, 0.223020761, 8.2809611, 0.379399134, 15.5934481),
        "mixed": (62.021493, 0.971606883, 0.0430198638, 9.84188204, 0.437171681, 15.1371793),
        "beyond": (73.9980734, 0.59313921, 0.0151884367, 8.69178329, 0.359981961, 16.0086387),
    }, ("margins",)),
    Published(partial(adaface), "mk-minchul/AdaFace at c60eaa78, head.py", {
        "easy": (12.3474473, 1.92872601, 0.477900728, 17.5509236, 0.8316395, 20.2625, 99.3866985),
        "mixed": (40.9834898, 2.06454183, 0.0916141385, 21.3363991, 0.927882009, 20.2625, 99.3866985),
        "beyond": (67.7493279, 1.29097322, 0.03474669, 18.9946019, 0.762676657, 20.2625, 99.3866985),
    }, ("mean", "std")),
    Published(partial(adaface, std=10.0), "mk-minchul/AdaFace at c60eaa78, head.py", {
        "easy": (16.0330336, 1.98761912, 0.490014115, 19.5703956, 0.864862557, 20.2625, 10.2866985),
        "mixed": (43.6183479, 1.93975311, 0.0898661255, 20.2408275, 0.896943785, 20.2625, 10.2866985),
    }, ("mean", "std")),
    Published(partial(magface), "IrvingMeng/MagFace at 99bae614, models/magface.py", {
        "easy": (17.602764, 2.0487261, 0.496911623, 19.6563281, 0.969557098),
        "mixed": (47.8805072, 1.70079291, 0.086486419, 20.5948397, 0.73645345),
        "beyond": (70.9473244, 1.31719186, 0.0324010397, 19.3107416, 0.501169943),
    }),
    Published(partial(elasticface, draws=DRAWS), "fdbtrs/ElasticFace at 5496ec06, utils/losses.py", {
        "easy": (13.9651553, 2.04205969, 0.49610001, 19.08197, 0.96724885),
        "mixed": (42.3433777, 1.62622438, 0.0855006238, 19.3132068, 0.646637488),
    }),
    Published(partial(elasticface, draws=DRAWS, kind="cos"), "fdbtrs/ElasticFace at 5496ec06, utils/losses.py", {
        "easy": (15.5432004, 1.92089877, 0.476131469, 17.5432651, 0.827344503),
        "mixed": (45.8298292, 2.07761206, 0.0917951516, 21.4705419, 0.930962117),
        "beyond": (72.0727379, 1.31784864, 0.0324010397, 19.3481513, 0.76690018),
    }),
    Published(partial(kappaface, **KAPPA), "Leminhbinh0209/KappaFace at 5158b2f0, losses.py and momentum_head.py", {
        "easy": (14.4821211, 2.03994144, 0.494962477, 19.1151444, 0.972649718),
        "mixed": (40.4123693, 1.59397132, 0.0848332051, 19.2894478, 0.673383258),
    }),
    Published(partial(sphereface2, straight_through=True, bias=SPHEREFACE2_BIAS),
              "ydwen/opensphere at a679e820, opensphere/module/head/sphereface2.py, divided by 50 / 40", {
        "easy": (13.0367079, 0.763144807, 0.0649243521, None, None, 0.981222725),
        "mixed": (26.9602134, 1.00590521, 0.0483196807, None, None, 0.843473148),
        "beyond": (31.9957269, 0.814546057, -0.209091645, None, None, 0.722009563),
    }, ("bias",)),
    Published(partial(uniface, bias=UNIFACE_BIAS), "CVI-SZU/UniFace at 00ade470, head.py", {
        "easy": (43.3954363, 2.33230953, 0.158073629, 32.3702601, -0.660780424, 3.32422972),
    }, ("bias",)),
]  # fmt: skip
