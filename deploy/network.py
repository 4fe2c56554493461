"""A trained network in a program of yours: embeddings of faces, how alike two are, and whom of a gallery they show.

    network = FaceNetwork("work_dirs/demo_cpu")
    print(network.verify("one.png", "other.png"))
    print(network.search("people.gallery", ["visitor.png"])[0])

Shapes: n = pictures, S = size of a crop, D = embedding size.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from eval.networks import add_network_arguments
from eval.verification import row_norms
from utils.cli import Parser, warn
from utils.files import read_bytes, shown
from utils.text import one_line

from .embed.embedder import open_embedder
from .faces.detector import add_detector_arguments, open_detector
from .faces.pictures import Rejected, add_which_argument, crops_of
from .gallery.adapted import adapted_of
from .gallery.commands import NO_DIRECTION, require_network, warn_of_other_detector
from .gallery.search import Match
from .gallery.store import Gallery
from .results import threshold_of

Picture = str | os.PathLike[str] | bytes | np.ndarray


class FaceNetwork:
    """A network on its device, and the detector before it.

    A picture is a file or its bytes: a photograph if there is a detector, else an aligned crop. An array (S, S, 3) uint8 RGB is
    an aligned crop.

    Attributes:
        title: name and state of the network, in one line.
        image_size: S.
        embedding_size: D.
    """

    def __init__(self, path: str | os.PathLike[str], **options: object) -> None:
        """Open a network.

        Args:
            path: run folder, checkpoint folder, weights (.safetensors, .pt, .pth), or .onnx.
            options: those of `face search` for networks and detectors: detector="yunet.onnx", device="cuda", best=True; for
                weights that do not say what they are backbone="r50".

        Raises:
            ValueError: there is no such option, or a file cannot be read.
        """
        parser = Parser("FaceNetwork", add_help=False, allow_abbrev=False)
        add_network_arguments(parser, positional=False)
        add_detector_arguments(parser)
        add_which_argument(parser, one=True)
        parser.error = _refuse  # type: ignore[method-assign]
        given = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None}
        words = [flag if value is True else f"{flag}={value}" for flag, value in given.items() if value is not False]
        self._options = parser.parse_args(words)
        self._options.run = Path(path)
        self._detector = open_detector(self._options)
        with torch.random.fork_rng(devices=[]):  # a run's network is built with the run's seed
            self._embedder = open_embedder(self._options)
        self.title, self.image_size = self._embedder.title, self._embedder.image_size
        self.embedding_size = self._embedder.embedding_size

    def embed(self, pictures: Sequence[Picture] | np.ndarray) -> np.ndarray:
        """Return the embeddings (n, D) float32 of the faces of pictures, as unit vectors: their products are cosines.

        Raises:
            ValueError: a picture cannot be used, or shows no face; it is named by its path, or by its number from 0.
            OSError: a file cannot be read.
        """
        if isinstance(pictures, str | bytes | os.PathLike):
            one = "..." if isinstance(pictures, bytes) else repr(shown(pictures))
            raise ValueError(f"pictures must be a list, got one: [{one}]")
        pictures = list(pictures)
        crops = [self._crop(picture, number) for number, picture in enumerate(pictures)]
        size = self.image_size
        raw = self._embedder.embed(np.stack(crops) if crops else np.zeros((0, size, size, 3), dtype=np.uint8))
        norms = row_norms(raw)
        for number in np.flatnonzero(~((norms > 0) & np.isfinite(norms))).tolist():
            raise ValueError(f"{_name(pictures[number], number)}: {NO_DIRECTION}")
        return (raw / norms[:, None]).astype(np.float32)

    def verify(self, first: Picture, second: Picture) -> float:
        """Return the cosine of the faces of two pictures; `threshold` says from where on they are one person's."""
        one, other = self.embed([first, second]).astype(np.float64)
        return float(np.clip(one @ other, -1, 1))

    def threshold(self, far: str | float, name: str | None = None, results: str | os.PathLike[str] | None = None) -> float:
        """Return the cosine above which only a share `far` of the impostor pairs lies.

        Args:
            name: of the verification set; None = the set with the highest threshold.
            results: what `face eval --report` wrote of this network; None = the results.json of the run.

        Raises:
            ValueError: there are no results of this network, or they have too few pairs for this rate.
        """
        if not 0 < float(far) <= 1:
            raise ValueError(f"far is a share of the impostor pairs, above 0 and at most 1, got {far}")
        wanted = {"far": str(far), "set": name, "results": results and Path(results), "threshold": None}
        found = threshold_of(argparse.Namespace(**{**vars(self._options), **wanted}))
        assert found is not None
        return found.cosine

    def search(self, gallery: Gallery | str | os.PathLike[str], pictures: Sequence[Picture], k: int = 5) -> list[list[Match]]:
        """Return the k people of a gallery who are most like the face of each picture, best first.

        Raises:
            ValueError: another network embedded the gallery.
        """
        if not isinstance(gallery, Gallery):
            with Gallery(Path(gallery)) as opened:
                return self.search(opened, pictures, k)
        require_network(gallery, self._embedder)
        if adapted_of(gallery) is not None:
            warn("the gallery is adapted from another network, so `threshold` does not hold for it")
        warn_of_other_detector(gallery, one_line(self._detector.name) if self._detector else "", self._options.which)
        return gallery.search(self.embed(pictures), k)

    def _crop(self, picture: Picture, number: int) -> np.ndarray:
        """Return the aligned face (S, S, 3) of a picture."""
        name, shape = _name(picture, number), (self.image_size, self.image_size, 3)
        if isinstance(picture, np.ndarray):
            if picture.shape != shape or picture.dtype != np.uint8:
                raise ValueError(f"{name}: an aligned crop must be {shape} uint8, got {picture.shape} {picture.dtype}")
            return picture
        data = picture if isinstance(picture, bytes) else read_bytes(Path(picture))
        found = crops_of(data, name, self._detector, self.image_size, self._options.which)
        if isinstance(found, Rejected):
            raise ValueError(f"{name}: {found.reason}")
        return found[0].pixels


def _name(picture: Picture, number: int) -> str:
    return f"picture {number}" if isinstance(picture, bytes | np.ndarray) else shown(picture)


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"FaceNetwork: {message}")
