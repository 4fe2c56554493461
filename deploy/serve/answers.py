"""What the page computes: how alike two faces are, and who of a gallery is most like one. It keeps nothing of the pictures."""

import argparse
import base64
import math
from pathlib import Path
from typing import Any

import numpy as np

from eval.monitor import load_pair_sets
from eval.report import as_json
from eval.verification import row_norms, verify
from utils.cli import progress
from utils.image import check_size, image_size, to_png

from ..embed.embedder import Embedder
from ..faces.detector import Detector
from ..faces.pictures import Rejected, crops_of
from ..gallery.store import Gallery
from ..results import SetResult, find_threshold, parse_results, read_results_of, results_file, set_of

_MAX_PIXELS = 64_000_000  # of an upload: 0.6 GB while it is decoded; phones have 12 to 50 million
_TOP = 5  # people that a search shows
WHICH_FACE = "largest"  # of several on a photograph


class UploadError(Exception):
    """A picture cannot be used: what the user of the page reads, and which of the pictures it is, from 0."""

    def __init__(self, message: str, picture: int = 0) -> None:
        super().__init__(message)
        self.picture = picture


class Answers:
    """Answers the page with one network.

    Args:
        detector: None = pictures must be aligned crops.
        gallery: to search, if there is one; embedded by this network.
        result: of a verification set, for the thresholds and the histogram, if there is one.
        far: as `result` writes it: the threshold that the page begins with.
    """

    def __init__(
        self, embedder: Embedder, detector: Detector | None, gallery: Gallery | None, result: SetResult | None, far: str
    ) -> None:
        self.embedder, self.detector, self.gallery, self.result, self.far = embedder, detector, gallery, result, far

    def about(self) -> dict[str, Any]:
        """Return what the page shows before any picture."""
        counts = self.gallery.people() if self.gallery else {}
        return {
            "network": self.embedder.title,
            "digest": self.embedder.digest,
            "image_size": self.embedder.image_size,
            "embedding_size": self.embedder.embedding_size,
            "detector": self.detector.name if self.detector else None,
            "gallery": {"people": len(counts), "images": sum(counts.values())} if self.gallery else None,
            "set": _set_of_page(self.result) if self.result else None,
            "far": self.far,
        }

    def verify(self, first: bytes, second: bytes) -> dict[str, Any]:
        """Return the cosine of the faces of two pictures, and the crops that were compared."""
        crops = [self._crop(data, number) for number, data in enumerate((first, second))]
        unit = [self._unit(crop, number) for number, crop in enumerate(crops)]
        return {"cosine": float(np.clip(unit[0] @ unit[1], -1, 1)), "faces": [_as_url(crop) for crop in crops]}

    def search(self, picture: bytes) -> dict[str, Any]:
        """Return the people of the gallery who are most like the face of a picture, best first."""
        if self.gallery is None:
            raise UploadError("there is no gallery; start the page with --gallery FILE")
        crop = self._crop(picture, 0)
        unit = self._unit(crop, 0)
        try:
            found = self.gallery.search(unit[None].astype(np.float32), _TOP)[0]
        except ValueError as error:  # another process damaged or changed it
            raise UploadError(f"The gallery cannot be searched: {error}") from None
        people = [{"name": match.person, "cosine": float(match.cosine), "image": match.image} for match in found]
        return {"face": _as_url(crop), "people": people}

    def gallery_picture(self, number: int) -> bytes | None:
        """Return the face of an image of the gallery as a PNG, None if there is none."""
        pixels = self.gallery.picture(number) if self.gallery else None
        return None if pixels is None else to_png(pixels)

    def _crop(self, data: bytes, number: int) -> np.ndarray:
        """Return the aligned face (S, S, 3) of a picture."""
        size = image_size(data)
        if size is not None:
            try:
                check_size(*size, _MAX_PIXELS)
            except ValueError:
                raise UploadError(
                    f"This picture declares {size[1]:,} x {size[0]:,} pixels, which is too many or no shape of a photograph. "
                    f"Make it smaller: {_MAX_PIXELS // 10**6} million pixels at most.",
                    number,
                ) from None
        found = crops_of(data, "this picture", self.detector, self.embedder.image_size, WHICH_FACE)
        if isinstance(found, Rejected):
            raise UploadError(_in_words(found.reason), number)
        return found[0].pixels

    def _unit(self, crop: np.ndarray, number: int) -> np.ndarray:
        """Return the unit embedding (D,) float64 of a crop."""
        try:
            raw = self.embedder.embed(crop[None])[0].astype(np.float64)
        except ValueError as error:
            raise UploadError(f"The network fails on this picture: {error}", number) from None
        norm = float(np.linalg.norm(raw))
        if not math.isfinite(norm) or norm == 0:
            raise UploadError("The network has no embedding for this picture: it returned zeros or no numbers.", number)
        return raw / norm


def _set_of_page(result: SetResult) -> dict[str, Any]:
    drawn = result.histogram
    return {
        "name": result.name,
        "num_genuine": result.num_genuine,
        "num_impostor": result.num_impostor,
        "points": [{"far": point.target, "cosine": point.cosine, "tar": point.tar} for point in result.measured()],
        "histogram": {"edges": drawn.edges, "genuine": drawn.genuine, "impostor": drawn.impostor} if drawn else None,
    }


def _in_words(reason: str) -> str:
    """Return why a picture was rejected, as a sentence for the user of the page."""
    if reason.startswith("no face found"):
        return "No face was found. Try a picture on which the face is larger, brighter, or seen from the front."
    if reason.startswith(("is ", "cannot ", "has ")):
        return f"This picture {reason}."
    return f"{reason[:1].upper()}{reason[1:]}."


def _as_url(pixels: np.ndarray) -> str:
    return f"data:image/png;base64,{base64.b64encode(to_png(pixels)).decode()}"


def result_of(options: argparse.Namespace, embedder: Embedder) -> tuple[SetResult | None, str]:
    """Return the numbers of the set whose thresholds the page shows, and the FAR that it begins with, "" if there is none.

    They are of --pairs, --results, or the run that is the network.
    """
    if options.pairs:
        if options.set:
            raise ValueError("--set chooses one of the sets of --results, and --pairs is one; leave it out")
        result = score(options.pairs, embedder)
        found, results = {result.name: result}, options.pairs
    else:
        results, _ = results_file(options)
        if results is None:
            for flag in ("far", "set"):
                if getattr(options, flag):
                    raise ValueError(f"--{flag} chooses a threshold of --results or --pairs; give one of them, or leave it out")
            return None, ""
        found = read_results_of(results, options.ema, options.set)
    if options.far is not None:
        threshold = find_threshold(found, options.far, options.set, results)
        return found[threshold.set], threshold.far
    largest = max(found, key=lambda name: found[name].num_impostor or 0)
    result = set_of(found, options.set or largest, results)
    return result, next((point.target for point in reversed(result.measured())), "")


def score(path: Path, embedder: Embedder) -> SetResult:
    """Return the numbers of a verification set, computed now."""
    pair_set = load_pair_sets("", [str(path)], "--pairs", "--pairs")[0]
    rows = []
    for first in progress(range(0, len(pair_set.images), embedder.step), None, "scoring the set", "batch"):
        numbers = range(first, min(first + embedder.step, len(pair_set.images)))
        rows.append(embedder.embed(np.stack([pair_set.decode(number, embedder.image_size) for number in numbers])))
    sums = np.concatenate(rows).astype(np.float64)
    norms = row_norms(sums)
    unit = sums / np.where(norms == 0, 1, norms)[:, None]
    result = verify(unit[pair_set.first], unit[pair_set.second], pair_set.same, xnorm=float(norms.mean()))
    return parse_results(as_json({pair_set.name: result}))[pair_set.name]
