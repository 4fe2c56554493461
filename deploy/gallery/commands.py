"""What can be done with a gallery besides enrolling and searching: show, check, remove, embed anew."""

import argparse
import json
import time
from collections.abc import Iterable

from utils.cli import progress
from utils.files import shown
from utils.text import one_line

from ..embed.embedder import open_embedder
from ..output import write_file
from .enrol import network_path
from .store import Gallery, Image, check_person


def show_gallery(options: argparse.Namespace) -> None:
    """Print what a gallery has."""
    with Gallery(options.gallery) as gallery:
        people, images = gallery.people(), gallery.images()
        facts = gallery.facts
    detector = f"{facts.detector}, {facts.which}" if facts.detector else "none, aligned crops"
    lines = {
        "people": f"{len(people):,}",
        "images": f"{len(images):,}, {sum(bool(image.face_sum) for image in images):,} with their face",
        "network": facts.title,
        "path of the network": facts.network_path or "not known",
        "digest of the network": facts.digest,
        "embedding": f"{facts.embedding_size} numbers, from {facts.image_size} x {facts.image_size} pixels",
        "detector": detector,
        "size": f"{options.gallery.stat().st_size / 1e6:.1f} MB",
    }
    print(*(f"{key:<22}{one_line(value)}" for key, value in lines.items()), sep="\n")
    if options.people:
        print(*(f"{count:>8,}  {one_line(name)}" for name, count in people.items()), sep="\n")
    if options.images:
        for one in images:
            print(f"{one.number:>8}  {one_line(one.person)}  {one_line(one.picture)}  {_day(one)}")
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
        print(f"{shown(options.gallery)}: {len(gallery.images()):,} vectors and {faces:,} faces are sound")


def remove_from_gallery(options: argparse.Namespace) -> None:
    """Erase people or images."""
    if not options.person and not options.image:
        raise ValueError("name whom to forget with --person, or images with --image")
    with Gallery(options.gallery) as gallery:
        count = gallery.remove([check_person(name) for name in options.person], options.image)
        left = gallery.people()
    print(
        f"{shown(options.gallery)}: {count} image(s) removed and overwritten; {sum(left.values()):,} images of {len(left):,} "
        "people are left"
    )


def reembed_gallery(options: argparse.Namespace) -> None:
    """Embed the faces of a gallery with another network."""
    with Gallery(options.gallery) as gallery:
        embedder = open_embedder(options)
        facts = gallery.facts._replace(
            title=one_line(embedder.title),
            digest=embedder.digest,
            embedding_size=embedder.embedding_size,
            image_size=embedder.image_size,
            network_path=network_path(options),
        )

        def wrap(images: Iterable[Image], total: int) -> Iterable[Image]:
            return progress(images, total, "embedding", "image")

        count = gallery.reembed(facts, embedder.embed, wrap)
    print(f"{shown(options.gallery)}: {count:,} images embedded by {facts.title}; thresholds of the old network do not hold")
