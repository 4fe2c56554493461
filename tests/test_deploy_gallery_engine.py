"""A gallery in a database of vectors: its own client gets the answers of the gallery."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from gallery_runs import DIM, FACTS, new_images
from tiny_runs import error_of, one_line

from deploy.gallery.store import Gallery
from scripts.deploy import gallery as program

PEOPLE = [f"Zo\u00eb {number % 17}" for number in range(60)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a gallery of 60 images of 17 people."""
    with Gallery.create(tmp_path / "staff.gallery", FACTS) as gallery:
        gallery.add(new_images(np.random.default_rng(0), PEOPLE, pixels=False))
    return tmp_path / "staff.gallery"


def test_qdrant_finds_the_same_people_with_the_same_scores(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    qdrant = pytest.importorskip("qdrant_client", reason="needs qdrant-client: pip install qdrant-client")
    place = str(tmp_path / "database")
    assert program.main(["export", str(path), "--to", place]) == 0
    assert "collection 'staff' has 60 vectors of 17 people" in capsys.readouterr().out
    queries = np.random.default_rng(1).normal(size=(20, DIM)).astype(np.float32)
    client = qdrant.QdrantClient(path=place)
    assert client.get_collection("staff").config.metadata == {"network": FACTS.network}
    with Gallery(path) as gallery:
        for query, expected in zip(queries, gallery.search(queries, 5), strict=True):
            groups = client.query_points_groups("staff", "person", query=query.tolist(), limit=5, group_size=1).groups
            assert [group.id for group in groups] == [match.person for match in expected]
            assert [group.hits[0].id for group in groups] == [match.image for match in expected]
            # products of two float32 unit vectors, each normalised again
            cosines = [match.cosine for match in expected]
            assert [group.hits[0].score for group in groups] == pytest.approx(cosines, abs=(DIM + 8) * 2.0**-24)
    client.close()
    assert "has a collection 'staff'; delete that" in error_of(program.main(["export", str(path), "--to", place]), capsys)


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    qdrant = pytest.importorskip("qdrant_client", reason="needs qdrant-client: pip install qdrant-client")
    place = str(tmp_path / "database")
    with mock.patch.object(qdrant.QdrantClient, "upsert", side_effect=RuntimeError("the disk\nis full")):
        servers = [(where, f"--to: no Qdrant at {where}: ") for where in ("http://127.0.0.1:1", "127.0.0.1:1")]
        for where, says in [(place, "failed: the disk"), *servers]:
            assert says in error_of(program.main(["export", str(path), "--to", where]), capsys, "exporting: ")
    client = qdrant.QdrantClient(path=place)
    assert not client.collection_exists("staff")
    client.close()


class _Refusing(BaseHTTPRequestHandler):
    """A server that notes the key of each request, and refuses it."""

    keys: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.keys.append(self.headers["api-key"])
        self.send_error(403)

    def log_message(self, *words: object) -> None:
        pass


def test_a_server_gets_the_environments_key(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("qdrant_client", reason="needs qdrant-client: pip install qdrant-client")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("QDRANT_API_KEY", "a secret\n")
    assert program.main(["export", str(path), "--to", "http://127.0.0.1:1"]) == 1
    assert "must be printable ASCII without spaces" in one_line(capsys)
    monkeypatch.setenv("QDRANT_API_KEY", "secret\n")  # as a file of it ends
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert program.main(["export", str(path), "--to", f"http://127.0.0.1:{server.server_port}"]) == 1
        server.shutdown()
    warned, *said = capsys.readouterr().err.splitlines()
    assert warned == "warning: --to: over http:// everybody on the way can read the key"
    assert set(_Refusing.keys) == {"secret"} and len(said) == 1 and "403" in said[0] and "secret" not in said[0]


def test_without_its_client_the_command_that_brings_it_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    assert program.main(["export", str(path), "--to", "database"]) == 1
    assert f"--to: needs qdrant-client: {sys.executable} -m pip install qdrant-client" in capsys.readouterr().err
