"""Enrol people in a gallery: python -m scripts.deploy.enrol NETWORK GALLERY FOLDER

FOLDER has a sub-folder of pictures for each person; see --person-from and --person for others. The pictures are aligned crops
of the network's size, or photographs if --detector names a face detector. GALLERY is a folder, made if there is none.

Pictures that are enrolled already are skipped, so that the same command continues after an interruption. Pictures are safe in
the gallery after each batch, and --list names them then. Those of which there is no face are listed with the reason.

Example: python -m scripts.deploy.enrol work_dirs/ms1mv3_r50 people.gallery people --detector yunet.onnx
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.deploy.enrol")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deploy.embed.embedder import Embedder, open_embedder
from deploy.faces.crops import Crop, Rejected, add_which_argument
from deploy.faces.detector import add_detector_arguments, open_detector
from deploy.gallery.format import Facts, check_person
from deploy.gallery.people import Faces, Picture, add_person_arguments, find_pictures, read_faces, with_people
from deploy.gallery.records import NewImage
from deploy.gallery.store import Gallery
from eval.networks import add_network_arguments
from utils.cli import make_parser, progress
from utils.files import shown
from utils.program import run_main
from utils.text import one_line

NO_DIRECTION = "the network returns no direction for it: zero, or not finite"
Waiting = tuple[Picture, bytes, Crop]  # a face to enrol, with the hash of its picture


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and enrol; return the exit status."""
    parser = make_parser("python -m scripts.deploy.enrol", __doc__)
    add_network_arguments(parser)
    parser.add_argument("gallery", type=Path, help="folder of the gallery; made if there is none")
    parser.add_argument("folder", type=Path, help="folder of pictures, or one picture")
    parser.add_argument("--person", metavar="NAME", help="this person is on all pictures")
    add_person_arguments(parser)
    add_detector_arguments(parser)
    add_which_argument(parser, one=True)
    parser.add_argument(
        "--no-pictures",
        action="store_true",
        help="keep no aligned faces in the gallery: searches then show none, and another network needs the pictures again",
    )
    parser.add_argument("--list", action="store_true", help="print a line for each picture when it is safe in the gallery")
    options = parser.parse_args(arguments)
    return run_main(lambda: enrol_all(options))


def enrol_all(options: argparse.Namespace) -> None:
    """Enrol the pictures of the command line, and say what became of them."""
    if options.person is not None:
        options.person = check_person(options.person)
    pictures, rejected = with_people(find_pictures(options.folder), options.person_from, options.person)
    embedder, detector = open_embedder(options), open_detector(options)
    name = detector.name if detector else ""
    facts = Facts(
        one_line(embedder.title), embedder.digest, embedder.embedding_size, embedder.image_size, one_line(name), options.which
    )
    with Gallery.create(options.gallery, facts) as gallery:
        require_network(gallery, embedder)
        warn_of_other_detector(gallery, facts.detector, options.which)
        known = gallery.images()
        there = {(image.person, image.hash) for image in known}
        owners = {image.hash: image.person for image in known}
        counts, waiting = {"enrolled": 0, "skipped": 0}, []
        faces = read_faces(pictures, detector, embedder.image_size, options.which, options.threads, there)
        with progress([], len(pictures), "enrolling", "picture") as bar:
            for one in faces:
                _warn_of_other_person(one, owners)
                if one.crops is None:
                    counts["skipped"] += 1
                    bar.update()
                elif isinstance(one.crops, Rejected):
                    rejected.append(one.crops)
                    bar.update()
                else:
                    waiting += [(one.picture, one.hash, crop) for crop in one.crops]
                if len(waiting) >= options.batch_size:
                    _enrol(waiting, gallery, embedder, options, counts, rejected)
                    bar.update(len(waiting))
                    waiting = []
            _enrol(waiting, gallery, embedder, options, counts, rejected)
            bar.update(len(waiting))
        people = gallery.people()
    for picture in rejected:
        print(f"rejected: {shown(picture.name)}: {one_line(picture.reason)}")
    print(
        f"{shown(options.gallery)}: {counts['enrolled']} pictures enrolled, {counts['skipped']} were there already, "
        f"{len(rejected)} rejected; now {sum(people.values()):,} of {len(people):,} people"
    )
    if rejected and not counts["enrolled"] and not counts["skipped"]:
        raise ValueError(f"{shown(options.folder)}: none of {len(rejected)} pictures could be enrolled; the reasons are above")


def _enrol(
    waiting: Sequence[Waiting],
    gallery: Gallery,
    embedder: Embedder,
    options: argparse.Namespace,
    counts: dict[str, int],
    rejected: list[Rejected],
) -> None:
    """Embed faces and add them in one transaction."""
    if not waiting:
        return
    raw = embedder.embed(np.stack([crop.pixels for _, _, crop in waiting]))
    images = []
    for (picture, found, crop), embedding in zip(waiting, raw, strict=True):
        if not np.isfinite(embedding).all() or not embedding.any():
            rejected.append(Rejected(picture.name, NO_DIRECTION))
            continue
        quality = 1.0 if crop.face is None else float(crop.face.score)
        pixels = None if options.no_pictures else crop.pixels
        images.append(NewImage(picture.person, picture.name, found, crop.number, quality, embedding, pixels))
    for image, number in zip(images, gallery.add(images), strict=True):
        counts["enrolled" if number else "skipped"] += 1
        if options.list and number:
            print(f"enrolled: {shown(image.picture)} as {image.person}, image {number}", flush=True)


def _warn_of_other_person(faces: Faces, owners: dict[bytes, str]) -> None:
    """Say it if the same picture is enrolled as somebody else: one of the two names is wrong."""
    if isinstance(faces.crops, Rejected) or not faces.hash:
        return
    other = owners.setdefault(faces.hash, faces.picture.person)
    if other != faces.picture.person:
        line = f"{shown(faces.picture.name)} is enrolled as {faces.picture.person}, and the same picture as {other}"
        print(f"warning: {one_line(line)}", file=sys.stderr)


def require_network(gallery: Gallery, embedder: Embedder) -> None:
    """Raise ValueError unless a gallery was embedded by this network: cosines of different networks mean nothing."""
    if gallery.facts.digest != embedder.digest:
        raise ValueError(
            f"{shown(gallery.folder)}: was embedded by {one_line(gallery.facts.title)}, another network than "
            f"{one_line(embedder.title)}; use that one, or change the gallery: python -m scripts.deploy.gallery reembed "
            f"{shown(gallery.folder)} NETWORK"
        )
    if (gallery.facts.embedding_size, gallery.facts.image_size) != (embedder.embedding_size, embedder.image_size):
        raise ValueError(f"{shown(gallery.folder)}: has other sizes than its own network; take a copy of the gallery")


def warn_of_other_detector(gallery: Gallery, detector: str, which: str) -> None:
    """Say it if the faces of the gallery were found in another way than those that come to it."""
    facts = gallery.facts
    if (facts.detector, facts.which) != (detector, which) and (facts.detector or detector):
        before, now = (f"{name} ({rule})" if name else "aligned crops" for name, rule in (facts[4:6], (detector, which)))
        line = f"the faces of {shown(gallery.folder)} are from {before}, these from {now}; cosines may be lower"
        print(f"warning: {one_line(line)}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
