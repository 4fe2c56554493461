"""Look after a gallery: face gallery COMMAND [GALLERY]

show says what is in it. check reads every byte. remove forgets people or single images and overwrites their vectors, faces and
rows with zeros; compact then writes the file anew, smaller, and without pieces of them that SQLite may have left. reembed
embeds all faces with another network; searches go on with the old one until it is done. adapt writes a copy for another network
without pictures. export copies the vectors into Qdrant, a database of vectors. Each command either happens completely, or
changes nothing.

Examples:
  face gallery show people.gallery --people
  face gallery remove people.gallery --person "Ada Lovelace"
  face gallery reembed people.gallery work_dirs/ms1mv3_r100
"""

import argparse
from pathlib import Path
from typing import Any

from deploy.gallery.adapted import adapt_gallery
from deploy.gallery.commands import DEFAULT, check_gallery, compact_gallery, reembed_gallery, remove_from_gallery, show_gallery
from deploy.gallery.engine import export_gallery
from eval.networks import add_network_arguments
from utils.cli import int_in_range, make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face gallery", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action: Any, text: str) -> argparse.ArgumentParser:
        part = commands.add_parser(name, help=text, description=text)
        part.add_argument("gallery", type=Path, nargs="?", default=DEFAULT, help="file")
        part.set_defaults(action=action)
        return part

    part = command("show", show_gallery, "say what is in a gallery")
    part.add_argument("--people", action="store_true", help="list the people with their numbers of images")
    part.add_argument("--images", action="store_true", help="list the images")
    part.add_argument("--json", type=Path, metavar="FILE", help="also write all of it there")
    command("check", check_gallery, "read every byte of a gallery that counts")
    part = command("remove", remove_from_gallery, "forget people or images")
    part.add_argument("--person", nargs="+", default=[], metavar="NAME", help="people, with all their images")
    part.add_argument("--image", nargs="+", type=int_in_range(1), default=[], metavar="NUMBER", help="single images, by number")
    command("compact", compact_gallery, "write the file anew, without the room of what was removed")
    part = command("reembed", reembed_gallery, "embed all faces of a gallery with another network")
    add_network_arguments(part)
    part = command(
        "adapt", adapt_gallery, "write a copy whose vectors are those of another network, by an adapter of `face adapt`"
    )
    part.add_argument("--with", type=Path, required=True, dest="adapter", metavar="FILE", help="the adapter")
    part.add_argument("--out", type=Path, required=True, metavar="GALLERY", help="the copy, a new file")
    part = command("export", export_gallery, "copy vectors, people's names and the network's fingerprint into Qdrant")
    part.add_argument("--to", required=True, metavar="PLACE", help="http://HOST:PORT of a server, or a folder of its client")
    options = parser.parse_args(arguments)
    return run_main(options.action, options)


if __name__ == "__main__":
    raise SystemExit(main())
