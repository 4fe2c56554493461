"""What the service computes: how alike two faces are, who of a gallery is most like one, and who is enrolled and removed."""

import argparse
import base64
import dataclasses
import hashlib
import math
import re
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from eval.monitor import load_pair_sets
from utils.cli import progress
from utils.files import shown
from utils.image import check_size, image_size, to_png

from ..embed.embedder import Embedder
from ..faces.detector import Detector
from ..faces.pictures import Crop, Rejected, crops_of
from ..gallery.database import check_person
from ..gallery.gate import EVERY_FACE, Gate
from ..gallery.store import Gallery, NewImage
from ..results import SetResult, find_threshold, parse_results, read_results_of, results_file, set_of

_MAX_PIXELS = 64_000_000  # of an upload: 0.6 GB while it is decoded; phones have 12 to 50 million
_TOP = 5  # people that a search shows
WHICH_FACE = "largest"  # of several on a photograph
NOTHING = "there is nothing here"
_DECODED = 2  # pictures that are decoded, and searched for faces, at once


class RefusedError(Exception):
    """A request that is answered with an error: the HTTP status, a sentence for the user, and which picture it is, from 0."""

    def __init__(self, status: int, message: str, picture: int | None = None) -> None:
        super().__init__(message)
        self.status, self.picture = status, picture


class Batcher:
    """Embeds what several threads ask for at once in one call of the network.

    A call of the network, `embed`, of crops (n, S, S, 3) uint8 -> (n, D), takes about as long for a few crops as for one. While
    it computes, requests gather for the next, which has up to `limit` crops.
    """

    def __init__(self, embed: Callable[[np.ndarray], np.ndarray], limit: int) -> None:
        self._embed, self._limit = embed, limit
        self.observe: Callable[[float], object] = lambda count: None  # is told the number of crops of each call
        self._waiting: deque[tuple[np.ndarray, Future]] = deque()
        self._thread = ThreadPoolExecutor(1, "embed")  # one, because each thread that computes has helpers of its own

    def __call__(self, crops: np.ndarray) -> np.ndarray:
        """Return the embeddings (n, D) of crops (n, S, S, 3); an error of the network is raised for its own crops alone."""
        answer: Future = Future()
        self._waiting.append((crops, answer))
        self._thread.submit(self._run)
        return answer.result()

    def _run(self) -> None:
        """Embed the first of those that wait; nothing if an earlier call took them along."""
        parts: list[tuple[np.ndarray, Future]] = []
        while self._waiting and (not parts or sum(len(one) for one, _ in [*parts, self._waiting[0]]) <= self._limit):
            parts.append(self._waiting.popleft())
        try:
            if parts:
                crops = np.concatenate([one for one, _ in parts])
                self.observe(len(crops))
                ends = np.cumsum([len(one) for one, _ in parts])
                for (_, answer), rows in zip(parts, np.split(self._embed(crops), ends[:-1]), strict=True):
                    answer.set_result(rows)
        except Exception:
            for one, answer in parts:
                try:
                    answer.set_result(self._embed(one))
                except Exception as error:
                    answer.set_exception(error)


@dataclasses.dataclass(eq=False)
class Answers:
    """Answers requests with one network. Several threads may ask at once."""

    embedder: Embedder
    detector: Detector | None  # None = pictures must be aligned crops
    gallery: Gallery | None  # to search, if there is one; embedded by this network
    result: SetResult | None  # of a verification set, for the thresholds and the histogram, if there is one
    far: str  # as `result` writes it: the threshold that the page begins with
    gate: Gate = EVERY_FACE  # of enrolment

    def __post_init__(self) -> None:
        self.batcher = Batcher(self.embedder.embed, self.embedder.step)
        self._decoding = threading.BoundedSemaphore(_DECODED)
        points = self.result.measured() if self.result else []
        self.threshold = next((point.cosine for point in points if point.target == self.far), None)

    def about(self) -> dict[str, Any]:
        """Return what the page shows before any picture."""
        return {
            "network": self.embedder.public_title,
            "digest": self.embedder.digest,
            "image_size": self.embedder.image_size,
            "embedding_size": self.embedder.embedding_size,
            "detector": self.detector.name if self.detector else None,
            "gallery": {what: self.gallery.count(what) for what in ("people", "images")} if self.gallery else None,
            "set": _set_of_page(self.result) if self.result else None,
            "far": self.far,
            "gate": self.gate._asdict(),
        }

    def verify(self, first: bytes, second: bytes) -> dict[str, Any]:
        """Return the cosine of the faces of two pictures, whether it is above the threshold, and the crops."""
        crops = [self._crop(data, number).pixels for number, data in enumerate((first, second))]
        unit = [row / norm for row, norm in self._embed(np.stack(crops))]
        cosine = float(np.clip(unit[0] @ unit[1], -1, 1))
        same = None if self.threshold is None else cosine > self.threshold
        return {"cosine": cosine, "same": same, "faces": [_as_url(crop) for crop in crops]}

    def embed(self, picture: bytes) -> dict[str, Any]:
        """Return the unit embedding of the face of a picture, and its length before."""
        row, norm = self._embed(self._crop(picture, 0).pixels[None])[0]
        return {"embedding": (row / norm).astype(np.float32).tolist(), "norm": norm}

    def search(self, picture: bytes) -> dict[str, Any]:
        """Return the people of the gallery who are most like a face, best first; `match` is above the threshold."""
        gallery = self._gallery()
        crop = self._crop(picture, 0).pixels
        row, norm = self._embed(crop[None])[0]
        try:
            found = gallery.search((row / norm)[None].astype(np.float32), _TOP)[0]
        except ValueError as error:  # another process damaged or changed it
            raise RefusedError(422, f"The gallery cannot be searched: {self._public(error)}", 0) from None
        people = [{"name": match.person, "cosine": float(match.cosine), "image": match.image} for match in found]
        known = self.threshold is not None and bool(found) and found[0].cosine > self.threshold
        return {"face": _as_url(crop), "people": people, "match": found[0].person if known else None}

    def people(self) -> dict[str, Any]:
        """Return the people of the gallery and their numbers of images."""
        return {"people": self._gallery().people()}

    def enrol(self, person: str, picture: bytes) -> dict[str, Any]:
        """Enrol a picture; the image is safe when this returns. Its number is None if the person has the picture already."""
        gallery = self._gallery()
        try:
            person = check_person(person)
        except ValueError as error:
            raise RefusedError(422, str(error)) from None
        crop = self._crop(picture, 0)
        row, norm = self._embed(crop.pixels[None])[0]
        if reason := self.gate.reason(norm, crop.padding):
            raise RefusedError(422, _in_words(reason), 0)
        hashed, embedding = hashlib.sha256(picture).digest(), row.astype(np.float32)
        image = NewImage(person, "sent to the service", hashed, crop.number, crop.quality, embedding, crop.pixels)
        try:
            return {"person": person, "image": gallery.add([image])[0] or None}
        except ValueError as error:  # the disk is full, another process changed it
            raise RefusedError(503, f"This cannot be enrolled: {self._public(error)}") from None

    def forget(self, people: list[str], images: list[str]) -> dict[str, Any]:
        """Erase people, and images by their numbers; the bytes are overwritten when this returns."""
        numbers = list(map(_number, images))
        try:
            return {"removed": self._gallery().remove([check_person(name) for name in people], numbers)}
        except ValueError as error:
            raise RefusedError(404, self._public(error)) from None

    def gallery_picture(self, number: str) -> bytes:
        """Return the face of an image of the gallery as a PNG."""
        pixels = self._gallery().picture(_number(number))
        if pixels is None:
            raise RefusedError(404, NOTHING)
        return to_png(pixels)

    def _public(self, error: ValueError) -> str:
        """Return an error of the gallery without paths, which are nothing for those who ask from elsewhere."""
        gallery = self._gallery()
        return str(error).replace(shown(gallery.path), "the gallery").replace(gallery.facts.title, "another network")

    def _gallery(self) -> Gallery:
        if self.gallery is None:
            raise RefusedError(422, "there is no gallery; start the program with --gallery FILE", 0)
        return self.gallery

    def _crop(self, data: bytes, number: int) -> Crop:
        """Return the aligned face of a picture."""
        size = image_size(data)
        if size is not None:
            try:
                check_size(*size, _MAX_PIXELS)
            except ValueError:
                raise RefusedError(
                    422,
                    f"This picture declares {size[1]:,} x {size[0]:,} pixels, which is too many or no shape of a photograph. "
                    f"Make it smaller: {_MAX_PIXELS // 10**6} million pixels at most.",
                    number,
                ) from None
        with self._decoding:
            found = crops_of(data, "this picture", self.detector, self.embedder.image_size, WHICH_FACE)
        if isinstance(found, Rejected):
            raise RefusedError(422, _in_words(found.reason), number)
        return found[0]

    def _embed(self, crops: np.ndarray, first: int = 0) -> list[tuple[np.ndarray, float]]:
        """Return the raw embedding (D,) float64 of the crops (n, S, S, 3) from number `first` on, and its length."""
        try:
            raw = self.batcher(crops).astype(np.float64)
        except ValueError as error:
            if len(crops) > 1:
                return [self._embed(crops[number : number + 1], number)[0] for number in range(len(crops))]
            why = str(error).replace(self.embedder.title, self.embedder.public_title)
            raise RefusedError(422, f"The network fails on this picture: {why}", first) from None
        found = [(row, float(np.linalg.norm(row))) for row in raw]
        for number, (_, norm) in enumerate(found, first):
            if not math.isfinite(norm) or norm == 0:
                words = "The network has no embedding for this picture: it returned zeros or no numbers."
                raise RefusedError(422, words, number)
        return found


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text):
        raise RefusedError(404, NOTHING)
    return int(text)


def _set_of_page(result: SetResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "num_genuine": result.num_genuine,
        "num_impostor": result.num_impostor,
        "points": [{"far": point.target, "cosine": point.cosine, "tar": point.tar} for point in result.measured()],
        "histogram": result.histogram,
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
    largest = max(found, key=lambda name: found[name].num_impostor or 0)
    result = set_of(found, options.set or largest, results)
    far = options.far or next((point.target for point in reversed(result.measured())), "")
    if not far:
        return result, ""
    threshold = find_threshold(found, far, options.set, results)  # as of a search
    return found[threshold.set], threshold.far


def score(path: Path, embedder: Embedder) -> SetResult:
    """Return the numbers of a verification set, computed now."""
    pair_set = load_pair_sets("", [str(path)], "--pairs", "--pairs")[0]
    rows = []
    for first in progress(range(0, len(pair_set.images), embedder.step), None, "scoring the set", "batch"):
        numbers = range(first, min(first + embedder.step, len(pair_set.images)))
        rows.append(embedder.embed(np.stack([pair_set.decode(number, embedder.image_size) for number in numbers])))
    sums = np.concatenate(rows)
    result = pair_set.verify_views(sums, np.zeros_like(sums))
    return parse_results({pair_set.name: result.as_json()})[pair_set.name]
