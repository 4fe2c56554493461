"""What the page computes: how alike two faces are, and who of a gallery is most like one. It keeps nothing of the pictures."""

import base64
import math
from typing import Any

import cv2
import numpy as np

from utils.image import check_size, image_size

from ..embed.embedder import Embedder
from ..faces.crops import Rejected, crops_of
from ..faces.detector import Detector
from ..gallery.store import Gallery
from ..results_file import SetResult
from .server import UploadError

_MAX_PIXELS = 64_000_000  # of an upload: 0.6 GB while it is decoded; phones have 12 to 50 million
_TOP = 5  # people that a search shows
WHICH_FACE = "largest"  # of several on a photograph


class DemoAnswers:
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
            raise UploadError("there is no gallery; start the page with --gallery DIR")
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
        return None if pixels is None else _png(pixels)

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
        "points": [
            {"far": point.target, "cosine": point.cosine, "tar": point.tar}
            for point in result.points
            if point.cosine is not None and point.tar is not None
        ],
        "histogram": {"edges": drawn.edges, "genuine": drawn.genuine, "impostor": drawn.impostor} if drawn else None,
    }


def _in_words(reason: str) -> str:
    """Return why a picture was rejected, as a sentence for the user of the page."""
    if reason.startswith("no face found"):
        return "No face was found. Try a picture on which the face is larger, brighter, or seen from the front."
    if reason.startswith(("is ", "cannot ", "has ")):
        return f"This picture {reason}."
    return f"{reason[:1].upper()}{reason[1:]}."


def _png(pixels: np.ndarray) -> bytes:
    return cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))[1].tobytes()


def _as_url(pixels: np.ndarray) -> str:
    return f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}"
