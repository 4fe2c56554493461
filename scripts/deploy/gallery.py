"""Look after a gallery: python -m scripts.deploy.gallery show|check|remove|compact|reembed GALLERY

show says what is in it. check reads every byte. remove forgets people or single images and overwrites their vectors, faces and
rows with zeros. compact makes the files smaller after that. reembed embeds all faces with another network; searches go on with
the old one until it is done. Each command either happens completely, or changes nothing.

Examples:
  python -m scripts.deploy.gallery show people.gallery --people
  python -m scripts.deploy.gallery remove people.gallery --person "Ada Lovelace"
  python -m scripts.deploy.gallery reembed people.gallery work_dirs/ms1mv3_r100
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.deploy.gallery")

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deploy.embed.embedder import open_embedder
from deploy.gallery.format import check_person
from deploy.gallery.records import Image
from deploy.gallery.rewrite import check, compact, reembed
from deploy.gallery.store import Gallery
from deploy.output import write_file
from eval.networks import add_network_arguments
from utils.cli import int_in_range, make_parser, progress
from utils.files import shown
from utils.program import run_main
from utils.text import one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command; return the exit status."""
    parser = make_parser("python -m scripts.deploy.gallery", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action: Any, text: str) -> argparse.ArgumentParser:
        part = commands.add_parser(name, help=text, description=text)
        part.add_argument("gallery", type=Path, help="folder of the gallery")
        part.set_defaults(action=action)
        return part

    part = command("show", _show, "say what is in a gallery")
    part.add_argument("--people", action="store_true", help="list the people with their numbers of images")
    part.add_argument("--images", action="store_true", help="list the images")
    part.add_argument("--json", type=Path, metavar="FILE", help="also write all of it there")
    command("check", _check, "read every byte of a gallery that counts")
    part = command("remove", _remove, "forget people or images")
    part.add_argument("--person", nargs="+", default=[], metavar="NAME", help="people, with all their images")
    part.add_argument("--image", nargs="+", type=int_in_range(1), default=[], metavar="NUMBER", help="single images, by number")
    command("compact", _compact, "write the files of a gallery anew, without what was removed")
    part = command("reembed", _reembed, "embed all faces of a gallery with another network")
    add_network_arguments(part)
    options = parser.parse_args(arguments)
    return run_main(lambda: options.action(options))


def _show(options: argparse.Namespace) -> None:
    with Gallery(options.gallery) as gallery:
        people, images = gallery.people(), gallery.images()
        facts = gallery.facts
    size = sum(path.stat().st_size for path in options.gallery.iterdir() if path.is_file())
    detector = f"{facts.detector}, {facts.which}" if facts.detector else "none, aligned crops"
    lines = {
        "people": f"{len(people):,}",
        "images": f"{len(images):,}, {sum(image.face_size > 0 for image in images):,} with their face",
        "network": facts.title,
        "digest of the network": facts.digest,
        "embedding": f"{facts.embedding_size} numbers, from {facts.image_size} x {facts.image_size} pixels",
        "detector": detector,
        "size": f"{size / 1e6:.1f} MB",
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


def _check(options: argparse.Namespace) -> None:
    with Gallery(options.gallery) as gallery:
        faces = check(gallery)
        print(f"{shown(options.gallery)}: {len(gallery.images()):,} vectors and {faces:,} faces are sound")


def _remove(options: argparse.Namespace) -> None:
    if not options.person and not options.image:
        raise ValueError("name whom to forget with --person, or images with --image")
    with Gallery(options.gallery) as gallery:
        count = gallery.remove([check_person(name) for name in options.person], options.image)
        left = gallery.people()
    print(
        f"{shown(options.gallery)}: {count} image(s) removed and overwritten; {sum(left.values()):,} images of {len(left):,} "
        "people are left"
    )


def _compact(options: argparse.Namespace) -> None:
    with Gallery(options.gallery) as gallery:
        freed = compact(gallery)
    print(f"{shown(options.gallery)}: {freed / 1e6:.1f} MB freed")


def _reembed(options: argparse.Namespace) -> None:
    with Gallery(options.gallery) as gallery:
        embedder = open_embedder(options)
        facts = gallery.facts._replace(
            title=one_line(embedder.title),
            digest=embedder.digest,
            embedding_size=embedder.embedding_size,
            image_size=embedder.image_size,
        )

        def wrap(images: Iterable[Image], total: int) -> Iterable[Image]:
            return progress(images, total, "embedding", "image")

        count = reembed(gallery, facts, embedder.embed, wrap)
    print(f"{shown(options.gallery)}: {count:,} images embedded by {facts.title}; thresholds of the old network do not hold")


if __name__ == "__main__":
    raise SystemExit(main())
