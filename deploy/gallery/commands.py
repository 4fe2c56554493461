"""What is done with a gallery besides searching: enrol pictures that a command line names, show, check, remove, embed anew."""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eval.networks import add_choice_of_network
from utils.checkpoint.format import newest_run
from utils.cli import make_parser, progress, warn
from utils.files import read_bytes, shown, write_file
from utils.parallel import map_in_order
from utils.text import one_line

from ..embed.embedder import Embedder, open_embedder
from ..faces.detector import Detector, open_detector
from ..faces.pictures import Crop, Rejected, crops_of, list_pictures
from ..faces.tracks import Span
from .adapted import adapted_of
from .database import Facts, check_person
from .gate import gate_of
from .store import Gallery, Image, NewImage

_RECORDED = {  # of a network, in a gallery: what load_network reads of the options, --trust-code aside, and their types
    **{"path": str, "best": bool, "untrained": bool, "ema": bool, "backbone": str, "embedding_size": int, "width": float},
    **{"image_size": int, "colour": str, "input_mean": float, "input_std": float},
}


class Picture(NamedTuple):
    """A picture file."""

    path: Path
    name: str  # relative to the folder that the command line names; the path if it names several
    person: str  # "" = not asked for


class Faces(NamedTuple):
    """The faces of a picture."""

    picture: Picture
    hash: bytes  # of the file's bytes; b"" if it cannot be read
    crops: list[Crop] | Rejected | None  # None = skipped


def add_person_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --person-from, who is on a picture."""
    rules = "folder = the sub-folder is the person; name = the file name up to its last underscore; anything else is a regular "
    rules += "expression for the picture's path below the folder, whose first group is the person"
    parser.add_argument("--person-from", type=_rule, default="folder", metavar="RULE", help=rules)


def find_pictures(path: Path) -> list[tuple[Path, str]]:
    """Return (path, name) of a picture, or of all below a folder in the order of their names; ValueError if there is none."""
    if path.is_dir():
        return [(path / name, name) for name in list_pictures(path)]
    if not path.exists():
        raise ValueError(f"{shown(path)}: no such picture or folder")
    return [(path, path.name)]


def with_people(
    pictures: Sequence[tuple[Path, str]], rule: str, person: str | None, whole_paths: bool = False
) -> tuple[list[Picture], list[Rejected]]:
    """Return the pictures with their people, and those whose person has no name, or none that is allowed.

    Args:
        rule: of --person-from.
        person: who is on all of them, None = by the rule.
        whole_paths: call the pictures by their paths, because those of several folders may have the same name.
    """
    named, rejected = [], []
    for path, name in pictures:
        called = str(path) if whole_paths else name
        try:
            named.append(Picture(path, called, check_person(person if person is not None else _person(name, rule))))
        except ValueError as error:
            rejected.append(Rejected(called, str(error)))
    return named, rejected


def _person(name: str, rule: str) -> str:
    if rule == "folder":
        folder, separator, _ = name.partition(os.sep)
        if not separator:
            raise ValueError("lies in no sub-folder, whose name would be the person's; see --person-from and --person")
        return folder
    if rule == "name":
        stem, separator, _ = Path(name).stem.rpartition("_")
        if not separator:
            raise ValueError("has no underscore in its name, before which the person would be; see --person-from")
        return stem
    found = re.search(rule, name)
    if not found or not found[1]:
        raise ValueError("does not match --person-from")
    return found[1]


def _rule(text: str) -> str:
    if text not in ("folder", "name"):
        try:
            groups = re.compile(text).groups
        except re.error as error:
            raise argparse.ArgumentTypeError(f"must be folder, name, or a regular expression: {error}") from None
        if not groups:
            raise argparse.ArgumentTypeError("must be folder, name, or a regular expression with a (group) for the person")
    return text


def read_faces(
    pictures: Sequence[Picture],
    detector: Detector | None,
    size: int,
    which: str,
    threads: int,
    skipped: frozenset[tuple[str, bytes]] | set[tuple[str, bytes]] = frozenset(),
) -> Iterator[Faces]:
    """Yield the faces of each picture, in order; a picture of a person in `skipped`, with this hash, is not decoded."""

    def work(picture: Picture) -> Faces:
        try:
            data = read_bytes(picture.path)
        except OSError as error:
            return Faces(picture, b"", Rejected(picture.name, f"cannot be read: {error.strerror}"))
        found = hashlib.sha256(data).digest()
        if (picture.person, found) in skipped:
            return Faces(picture, found, None)
        return Faces(picture, found, crops_of(data, picture.name, detector, size, which))

    return map_in_order(work, pictures, threads, ahead=4)


NO_DIRECTION = "the network returns no direction for it: zero, or not finite"


class EmbeddedFace(NamedTuple):
    """A face of a picture, or a track of a video, and its raw embedding (D,)."""

    picture: Picture
    hash: bytes  # of the picture; b"" of a video
    crop: Crop  # of a track the best
    embedding: np.ndarray
    span: Span | None = None  # of a track


def embed_faces(
    faces: Iterable[Faces], total: int, what: str, embedder: Embedder, rejected: list[Rejected]
) -> Iterator[list[EmbeddedFace]]:
    """Yield the embedded faces of `total` pictures, some at a time, under a progress bar that says `what` is being done.

    Pictures and faces without an embedding go to `rejected`.
    """

    def embed(waiting: list[tuple[Picture, bytes, Crop]]) -> list[EmbeddedFace]:
        raw = embedder.embed(np.stack([crop.pixels for _, _, crop in waiting]))
        norms = np.linalg.norm(raw.astype(np.float64), axis=1)
        sound = np.isfinite(norms) & (norms > 0)
        rejected.extend(Rejected(one[0].name, NO_DIRECTION) for one, good in zip(waiting, sound, strict=True) if not good)
        return [EmbeddedFace(*one, row) for one, row, good in zip(waiting, raw, sound, strict=True) if good]

    waiting: list[tuple[Picture, bytes, Crop]] = []
    with progress([], total, what, "picture") as bar:
        for number, one in enumerate(faces, 1):
            if isinstance(one.crops, Rejected):
                rejected.append(one.crops)
            else:
                waiting += [(one.picture, one.hash, crop) for crop in one.crops or ()]
            if len(waiting) >= embedder.step:
                yield embed(waiting)
                waiting = []
            if not waiting:
                bar.update(number - bar.n)
        if waiting:
            yield embed(waiting)
            bar.update(total - bar.n)


def print_rejected(rejected: Sequence[Rejected], all_of_them: bool = False) -> None:
    """Print the rejected pictures by reason, three of each; numbers in it, such as the sides of a picture, may differ."""
    by_reason: dict[str, list[str]] = {}
    for one in rejected:
        line = f"rejected: {shown(one.name)}: {one_line(one.reason)}"
        by_reason.setdefault(re.sub(r"\d+", "", one.reason), []).append(line)
    for lines in by_reason.values():
        print(*lines[: None if all_of_them else 3], sep="\n")
        if len(lines) > 3 and not all_of_them:
            print(f"rejected: {len(lines) - 3:,} more for the same reason")


DEFAULT = Path("people.gallery")
_SQLITE = b"SQLite format 3\0"  # at the start of its files


def enrol_all(options: argparse.Namespace) -> None:
    """Enrol the pictures of the command line, and say what became of them."""
    if options.person is not None:
        options.person = check_person(options.person)
    pictures, rejected = with_people(find_pictures(options.folder), options.person_from, options.person)
    if options.run is None and options.gallery.is_file() and options.gallery.stat().st_size:
        with contextlib.suppress(ValueError):  # perhaps it lies elsewhere now, and is the newest run
            take_recorded_network(options)
    options.run = options.run or newest_run()
    recorded = recorded_network(options)
    embedder, detector = open_embedder(options), open_detector(options)
    facts = facts_of(options, embedder, detector, recorded)
    with Gallery.create(options.gallery, facts) as gallery:
        known = gallery.hashes()
        if known:
            require_network(gallery, embedder)
            warn_of_other_detector(gallery, facts.detector, options.which)
        there, owners = set(known), {found: person for person, found in known}
        counts = {"enrolled": 0, "skipped": 0}

        def faces() -> Iterator[Faces]:
            found = read_faces(pictures, detector, embedder.image_size, options.which, options.threads, there)
            for one in found:
                _warn_of_other_person(one, owners)
                counts["skipped"] += one.crops is None
                yield one

        for batch in embed_faces(faces(), len(pictures), "enrolling", embedder, rejected):
            _enrol(_good(batch, options, rejected), gallery, options, counts, facts)
        images, people = gallery.count("images"), gallery.count("people")
        if counts["enrolled"] and not known:  # another program may have been first
            warn_of_other_detector(gallery, facts.detector, options.which)
    print_rejected(rejected, options.list)
    print(
        f"{shown(options.gallery)}: {counts['enrolled']} pictures enrolled, {counts['skipped']} were there already, "
        f"{len(rejected)} rejected; now {images:,} images of {people:,} people"
    )
    if rejected and not counts["enrolled"] and not counts["skipped"]:
        raise ValueError(f"{shown(options.folder)}: none of {len(rejected)} pictures could be enrolled; the reasons are above")


def facts_of(options: argparse.Namespace, embedder: Embedder, detector: Detector | None, recorded: str) -> Facts:
    """Return what a new gallery records; `recorded` is that of `recorded_network`, from before the network was read."""
    name, path = (one_line(detector.name), _stored_path(options.detector)) if detector else ("", "")
    sizes = embedder.embedding_size, embedder.image_size
    return Facts(one_line(embedder.title), embedder.digest, *sizes, name, options.which, recorded, path)


def _enrol(
    faces: Sequence[EmbeddedFace], gallery: Gallery, options: argparse.Namespace, counts: dict[str, int], facts: Facts
) -> None:
    """Add faces in one transaction."""
    images = []
    for picture, found, crop, embedding, _ in faces:
        pixels = None if options.no_pictures else crop.pixels
        images.append(NewImage(picture.person, picture.name, found, crop.number, crop.quality, embedding, pixels))
    for image, number in zip(images, gallery.add(images, facts), strict=True):
        counts["enrolled" if number else "skipped"] += 1
        if options.list and number:
            norm = np.linalg.norm(image.embedding.astype(np.float64))
            print(f"enrolled: {shown(image.picture)} as {image.person}, image {number}, norm {norm:#.4g}", flush=True)


def _good(faces: Sequence[EmbeddedFace], options: argparse.Namespace, rejected: list[Rejected]) -> list[EmbeddedFace]:
    """Return the faces that pass --min-norm and --max-padding; the others go to `rejected`."""
    good, gate = [], gate_of(options)
    for face in faces:
        reason = gate.reason(float(np.linalg.norm(face.embedding.astype(np.float64))), face.crop.padding)
        if reason:
            rejected.append(Rejected(face.picture.name, reason))
        else:
            good.append(face)
    return good


def _warn_of_other_person(faces: Faces, owners: dict[bytes, str]) -> None:
    """Say it if the same picture is enrolled as somebody else: one of the two names is wrong."""
    if isinstance(faces.crops, Rejected) or not faces.hash:
        return
    other = owners.setdefault(faces.hash, faces.picture.person)
    if other != faces.picture.person:
        warn(f"{shown(faces.picture.name)} is enrolled as {faces.picture.person}, and the same picture as {other}")


def require_network(gallery: Gallery, embedder: Embedder) -> None:
    """Raise ValueError unless a gallery was embedded by this network: cosines of different networks mean nothing."""
    if gallery.facts.network != embedder.digest:
        raise ValueError(
            f"{shown(gallery.path)}: was embedded by {one_line(gallery.facts.title)}, another network than "
            f"{one_line(embedder.title)}; name that one before the gallery, or embed its faces anew: face gallery reembed "
            f"{shown(gallery.path)} NETWORK"
        )
    if (gallery.facts.embedding_size, gallery.facts.image_size) != (embedder.embedding_size, embedder.image_size):
        raise ValueError(f"{shown(gallery.path)}: has other sizes than its own network; take a copy of the gallery")


def warn_of_other_detector(gallery: Gallery, detector: str, which: str) -> None:
    """Say it if the faces of the gallery were found in another way than those that come to it."""
    facts = gallery.facts
    if (facts.detector, facts.which) != (detector, which) and (facts.detector or detector):
        before, now = (f"{name} ({rule})" if name else "aligned crops" for name, rule in (facts[4:6], (detector, which)))
        warn(f"the faces of {shown(gallery.path)} are from {before}, these from {now}; cosines may be lower")


def choose_words(words: Sequence[Path]) -> tuple[Path | None, Path, list[Path]]:
    """Return network, gallery and the other words of a command line [[NETWORK] GALLERY] WORDS...

    A word is a gallery if it ends in .gallery or is a file of SQLite; without one it is people.gallery.
    """
    for place, word in enumerate(words[:2]):
        if place + 1 < len(words) and _is_gallery(word):
            return (words[0] if place else None), word, list(words[place + 1 :])
    return None, DEFAULT, list(words)


def _is_gallery(path: Path) -> bool:
    if path.suffix == DEFAULT.suffix:
        return True
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def take_recorded_network(options: argparse.Namespace) -> None:
    """Set the network and the detector of the options to those that the gallery was enrolled with."""
    with Gallery(options.gallery) as gallery:
        facts = gallery.facts
    recorded: dict[str, Any] = {"path": facts.network_path}
    if facts.network_path.startswith("{"):
        try:
            recorded = dict(json.loads(facts.network_path))
            sound = all(type(value) is _RECORDED[name] for name, value in recorded.items()) and bool(recorded["path"].encode())
            sound &= recorded.get("colour", "rgb") in ("rgb", "bgr")
        except (ValueError, TypeError, KeyError, RecursionError):
            sound = False
        if not sound:
            raise ValueError(f"{shown(options.gallery)}: it does not say how its network is read; name that before the gallery")
    path = Path(recorded.pop("path"))
    if not facts.network_path or not path.exists():
        quoted = shlex.quote(shown(options.gallery))
        raise ValueError(
            f"{shown(options.gallery)}: its network, {one_line(facts.title)}, is not "
            f"{f'at {shown(path)}' if facts.network_path else 'recorded'}; name it, as in face search NETWORK "
            f"{quoted} PICTURES or face serve NETWORK --gallery {quoted}"
        )
    options.run, usual = path, _usual_choice()
    for name, value in recorded.items():
        if getattr(options, name) == usual[name]:
            setattr(options, name, value)
    if options.detector is None and facts.detector_path:
        options.detector = Path(facts.detector_path)


def recorded_network(options: argparse.Namespace) -> str:
    """Return what Facts.network_path is: the path of the network, or JSON of the path and the options that choose it."""
    path, values = _stored_path(options.run), vars(options)
    given = {name: values[name] for name, usual in _usual_choice().items() if name in _RECORDED and values[name] != usual}
    return json.dumps({"path": path, **given}) if given else path


def _usual_choice() -> dict[str, Any]:
    """Return the options that choose a network, by name, with the values that they have where the command line has none."""
    parser = make_parser("", "")
    add_choice_of_network(parser, positional=False)
    return vars(parser.parse_args([]))


def _stored_path(path: Path) -> str:
    return os.fsencode(path.resolve()).decode("utf-8", "replace")


def show_gallery(options: argparse.Namespace) -> None:
    """Print what a gallery has."""
    with Gallery(options.gallery) as gallery:
        people = gallery.people() if options.people or options.json else {}
        images = gallery.images() if options.images or options.json else []
        counts = [f"{gallery.count(what):,}" for what in ("people", "images", "faces")]
        facts, adapted = gallery.facts, adapted_of(gallery)
    detector = f"{facts.detector}, {facts.which}" if facts.detector else "none, aligned crops"
    lines = {
        "people": counts[0],
        "images": f"{counts[1]}, {counts[2]} with their face",
        "network": facts.title,
        "network read from": facts.network_path or "not known",
        "digest of the network": facts.network,
        **({} if adapted is None else {"vectors adapted from": f"{adapted.source}, by the adapter {adapted.adapter}"}),
        "embedding": f"{facts.embedding_size} numbers, from {facts.image_size} x {facts.image_size} pixels",
        "detector": detector,
        "size": f"{options.gallery.stat().st_size / 1e6:.1f} MB",
    }
    print(*(f"{key:<22}{one_line(value)}" for key, value in lines.items()), sep="\n")
    if options.people:
        print(*(f"{count:>8,}  {one_line(name)}" for name, count in people.items()), sep="\n")
    if options.images:
        for one in images:
            print(f"{one.number:>8}  {one_line(one.person)}  {one_line(one.picture)}  norm {one.norm:#.4g}  {_day(one)}")
    if options.json:
        listed = [
            {"image": one.number, "person": one.person, "picture": one.picture, "norm": one.norm, "added": one.added}
            for one in images
        ]
        text = json.dumps({**facts._asdict(), "people": people, "images": listed}, indent=1)
        write_file(options.json, f"{text}\n".encode())


def _day(image: Image) -> str:
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(image.added))
    except (OverflowError, ValueError, OSError):  # of a damaged row
        return "?"


def check_gallery(options: argparse.Namespace) -> None:
    """Read every byte of a gallery, and say what is wrong."""
    with Gallery(options.gallery) as gallery:
        faces = gallery.check()
        print(f"{shown(options.gallery)}: {gallery.count('images'):,} vectors and {faces:,} faces are sound")


def remove_from_gallery(options: argparse.Namespace) -> None:
    """Erase people or images."""
    if not options.person and not options.image:
        raise ValueError("name whom to forget with --person, or images with --image")
    with Gallery(options.gallery) as gallery:
        count = gallery.remove([check_person(name) for name in options.person], options.image)
        images, people = gallery.count("images"), gallery.count("people")
    print(
        f"{shown(options.gallery)}: {count} image(s) removed and overwritten; {images:,} images of {people:,} people are left"
    )


def compact_gallery(options: argparse.Namespace) -> None:
    """Write the file of a gallery anew."""
    with Gallery(options.gallery) as gallery:
        before = options.gallery.stat().st_size
        gallery.compact()
    print(f"{shown(options.gallery)}: {before / 1e6:,.1f} MB before, now {options.gallery.stat().st_size / 1e6:,.1f} MB")


def reembed_gallery(options: argparse.Namespace) -> None:
    """Embed the faces of a gallery with another network."""
    with Gallery(options.gallery) as gallery:
        recorded = recorded_network(options)
        embedder = open_embedder(options)
        facts = gallery.facts._replace(
            title=one_line(embedder.title),
            digest=embedder.digest,
            embedding_size=embedder.embedding_size,
            image_size=embedder.image_size,
            network_path=recorded,
        )
        count = gallery.reembed(facts, embedder.embed, lambda images, total: progress(images, total, "embedding", "image"))
    print(f"{shown(options.gallery)}: {count:,} images embedded by {facts.title}; thresholds of the old network do not hold")
