"""Copies a gallery into Qdrant, a database of vectors, for programs that ask that one."""

import argparse
import os
import re
import warnings
from typing import Any

from utils.cli import progress, warn
from utils.files import shown
from utils.text import one_line, pip_install

from .store import Gallery


def export_gallery(options: argparse.Namespace) -> None:
    """Write the vectors, people's names and fingerprint of the network into a new collection, called as the gallery's file."""
    try:
        import qdrant_client
    except ImportError:
        raise ValueError(f"--to: needs qdrant-client: {pip_install('qdrant-client')}") from None
    place, name = options.to, options.gallery.stem
    is_server = re.match("https?://|[^/]+:[0-9]+$", place)
    key = _key() if is_server else None
    if key and place.startswith("http://"):
        warn("--to: over http:// everybody on the way can read the key")
    with Gallery(options.gallery) as gallery, gallery.reading():
        searcher = gallery.searcher()  # checks all vectors
        try:
            where: dict[str, Any] = {"url": place, "api_key": key} if is_server else {"path": place}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what they say is said here
                client = qdrant_client.QdrantClient(**where)
            is_there = client.collection_exists(name)
        except Exception as error:  # it raises those of its libraries
            raise ValueError(f"--to: no Qdrant at {shown(place)}: {one_line(error)}") from None
        if is_there:
            raise ValueError(f"--to: {shown(place)} has a collection {name!r}; delete that, or take a gallery of another name")
        try:
            _fill(client, qdrant_client.models, name, gallery, searcher)
        except BaseException as error:
            client.delete_collection(name)
            if not isinstance(error, Exception):
                raise
            raise ValueError(f"--to: Qdrant at {shown(place)} failed: {one_line(error)}") from None
        finally:
            client.close()
    print(f"{shown(place)}: collection {name!r} has {len(searcher.numbers):,} vectors of {len(searcher.people):,} people")


def _key() -> str | None:
    """Return the key of QDRANT_API_KEY, which no error may quote; None if there is none."""
    key = os.environ.get("QDRANT_API_KEY", "").strip()
    if not re.fullmatch("[!-~]*", key):
        raise ValueError("QDRANT_API_KEY: a key must be printable ASCII without spaces; set the key that the server has")
    return key or None


def _fill(client: Any, models: Any, name: str, gallery: Gallery, searcher: Any) -> None:
    facts, begin = gallery.facts, 0
    vectors = models.VectorParams(size=facts.embedding_size, distance=models.Distance.COSINE)
    client.create_collection(name, vectors_config=vectors, metadata={"network": facts.network})
    with progress([], len(searcher.numbers), "exporting", "vector") as bar:
        for rows in searcher.vectors():
            part = slice(begin, begin := begin + len(rows))
            people = [{"person": searcher.people[owner]} for owner in searcher.owner[part].tolist()]
            if people:
                batch = models.Batch(ids=searcher.numbers[part].tolist(), vectors=rows.tolist(), payloads=people)
                client.upsert(name, batch, wait=True)
            bar.update(len(rows))
