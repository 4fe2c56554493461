"""The page over HTTP and in a browser: right answers, and requests that no page sends."""

import base64
import contextlib
import http.client
import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
import torch
from pictures import jpeg, picture, png_of
from test_deploy_serve_rest import _embeddings
from tiny_networks import TIMES_MATRIX, write_onnx
from tiny_runs import error_of, wait_for

from deploy.embed.embedder import open_embedder
from deploy.faces.detector import Detector, Face
from deploy.gallery.database import Facts
from deploy.gallery.store import Gallery, NewImage
from deploy.results import read_results
from deploy.serve import server as page_server
from deploy.serve.answers import Answers, Batcher, RefusedError, result_of, score
from eval.__main__ import main as evaluate
from eval.pair_sets.bin_file import read_bin, write_bin
from scripts.deploy import serve as program
from utils.alignment import TEMPLATE, align
from utils.image import decode_rgb

pytestmark = pytest.mark.numeric
NAMES = ("Ann", "<img src=x onerror=\"document.title='broken in'\">", "Zo\u00eb \u0623\u062d\u0645\u062f")
SIZE = 48
POINTS = TEMPLATE * 0.6  # of a face that is to be enlarged and moved
SETTINGS = ["--device", "cpu", "--threads", "1", "--image-size", str(SIZE)]


def _face(person: int, take: int = 0) -> bytes:
    """Return a PNG of a person: another picture each time, but like the others."""
    noise = np.random.default_rng(take).normal(0, 12, (SIZE, SIZE, 3))
    pixels = (picture(person, SIZE) + noise).clip(0, 255).astype(np.uint8)
    return cv2.imencode(".png", pixels[:, :, ::-1])[1].tobytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a network, a verification set and its results."""
    folder = tmp_path_factory.mktemp("demo")
    matrix = np.random.default_rng(0).normal(size=(8, 48)).astype(np.float32)  # from 4 x 4 mean colours to 8 numbers
    pooled = ("AveragePool", {"kernel_shape": [12, 12], "strides": [12, 12]})
    write_onnx(folder / "face.onnx", [pooled, ("Flatten", {}), TIMES_MATRIX], 8, SIZE, matrix=matrix)
    same = [bool(pair % 2) for pair in range(60)]
    images = [_face(pair + (100 * side if not same[pair] else 0), 2 * pair + side) for pair in range(60) for side in (0, 1)]
    write_bin(folder / "tiny.bin", images, same)
    command = [str(folder / "face.onnx"), *SETTINGS, "--targets", str(folder / "tiny.bin"), "--report", str(folder / "report")]
    assert evaluate(command) == 0
    return folder


def _options(place: Path, *more: str) -> Any:
    """Return the options of a command line."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "serve_page", found.append)
        assert program.main([str(place / "face.onnx"), *SETTINGS, "--port", "0", *more]) == 0
    return found[0]


class Page:
    """A page that is being served, as a client sees it."""

    def __init__(self, server: page_server.PageServer) -> None:
        self.server, self.port = server, server.port

    def ask(
        self, method: str, path: str, body: bytes | None = None, timeout: float = 20, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and contents of a response; an underscore in the name of a header is a dash."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, given)
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        found = {name.lower(): value for name, value in reply.getheaders()}
        return reply.status, found, json.loads(data) if found["content-type"] == "application/json" else data

    def send(self, path: str, *pictures: bytes, **headers: str) -> tuple[int, Any]:
        """Send pictures as the page does; return status and contents."""
        sizes = ", ".join(str(len(data)) for data in pictures)
        given = {"Content_Type": "application/octet-stream", "Picture_Sizes": sizes, **headers}
        status, _, found = self.ask("POST", path, b"".join(pictures), **given)
        return status, found

    def raw(self, data: bytes, seconds: float = 20) -> bytes:
        """Send bytes; return what comes until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(data)
            parts = []
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(65536):
                    parts.append(part)
        return b"".join(parts)


@contextlib.contextmanager
def _served(answers: Any) -> Iterator[Page]:
    page = page_server.PageServer(0, answers)
    thread = threading.Thread(target=page.serve, daemon=True)
    thread.start()
    wait_for(lambda: page.server.started, 10)
    try:
        yield Page(page)
    finally:
        page.server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def answers(place: Path) -> Answers:
    """Return what the page computes, with a gallery of three people."""
    options = _options(place, "--results", str(place / "report" / "results.json"), "--far", "1e-1")
    embedder = open_embedder(options)
    gallery = Gallery.create(place / "gallery", Facts(embedder.title, embedder.digest, 8, SIZE, "", "largest"))
    pixels = [decode_rgb(_face(person, 7)) for person in range(3)]
    rows = embedder.embed(np.stack(pixels))
    gallery.add(
        [
            NewImage(name, f"{number}.png", bytes([number]) * 16, 0, 1.0, row, crop)
            for number, (name, row, crop) in enumerate(zip(NAMES, rows, pixels, strict=True))
        ]
    )
    result, _ = result_of(options, embedder)
    return Answers(embedder, None, gallery, result, "1e-1")


@pytest.fixture(scope="module")
def page(answers: Answers) -> Iterator[Page]:
    with _served(answers) as found:
        yield found


def _reference(place: Path, *pictures: bytes) -> np.ndarray:
    """Return the unit embeddings (n, D) float64 by onnxruntime alone."""
    rows = _embeddings(place, *pictures)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# ---- answers


def test_the_score_of_two_pictures_is_that_of_the_network(page: Page, place: Path):
    first, second = _face(0, 1), _face(1, 2)
    status, found = page.send("/api/verify", first, second)
    rows = _reference(place, first, second)
    assert status == 200 and found["cosine"] == pytest.approx(rows[0] @ rows[1], abs=1e-5)
    crop = base64.b64decode(found["faces"][0].removeprefix("data:image/png;base64,"))
    assert (decode_rgb(crop) == decode_rgb(first)).all()
    assert page.send("/api/verify", first, first)[1]["cosine"] == pytest.approx(1, abs=1e-6)


def test_a_search_names_the_most_similar_people(page: Page, place: Path):
    query = _face(1, 30)
    status, found = page.send("/api/search", query)
    rows = _reference(place, query, *(_face(person, 7) for person in range(3)))
    cosines = rows[1:] @ rows[0]
    order = np.argsort(-cosines)
    assert status == 200 and [one["name"] for one in found["people"]] == [NAMES[number] for number in order] and order[0] == 1
    assert [one["cosine"] for one in found["people"]] == pytest.approx(cosines[order].tolist(), abs=1e-5)
    shown, headers, data = page.ask("GET", f"/gallery/{found['people'][0]['image']}")
    assert (shown, headers["content-type"]) == (200, "image/png") and (decode_rgb(data) == decode_rgb(_face(1, 7))).all()


def test_a_program_may_search_with_the_bytes_of_a_picture_alone(page: Page):
    query = _face(1, 30)
    status, _, found = page.ask("POST", "/api/search", query, Content_Type="application/octet-stream")
    assert status == 200 and found == page.send("/api/search", query)[1]


def test_the_page_has_the_thresholds_and_the_histogram_of_the_results(page: Page, place: Path):
    _, _, about = page.ask("GET", "/api/info")
    file = json.loads((place / "report" / "results.json").read_text())["tiny"]
    assert about["set"]["histogram"]["genuine"] == file["similarities"]["genuine"] and about["set"]["num_impostor"] == 30
    pairs, drawn = read_bin(place / "tiny.bin"), about["set"]["histogram"]
    rows = _reference(place, *pairs.images)
    cosines, middles = (rows[pairs.first] * rows[pairs.second]).sum(axis=1), np.convolve(drawn["edges"], [0.5, 0.5], "valid")
    for kind, same in (("genuine", True), ("impostor", False)):  # each pair is within half an interval of its middle
        mean = np.average(middles, weights=drawn[kind])
        assert mean == pytest.approx(cosines[pairs.same == same].mean(), abs=drawn["edges"][1] - drawn["edges"][0])
    measured = [point for point in file["operating_points"] if point["tar"] is not None]
    assert [point["cosine"] for point in about["set"]["points"]] == [point["cosine_threshold"] for point in measured]
    assert about["far"] == "1e-1" and about["gallery"] == {"people": 3, "images": 3} and about["detector"] is None
    assert about["max_bytes"] == page_server.MAX_PICTURE and about["image_size"] == SIZE


def test_numbers_that_are_computed_now_are_those_of_a_report(place: Path, answers: Answers):
    """Up to the rounding of float32 sums, which here are added before they are float64."""
    now = score(place / "tiny.bin", answers.embedder)
    before = read_results(place / "report" / "results.json")["tiny"]
    assert (now.num_genuine, now.num_impostor, now.accuracy, now.eer) == (30, 30, before.accuracy, before.eer)
    assert [point.cosine for point in now.measured()] == pytest.approx([point.cosine for point in before.measured()], abs=1e-5)
    assert now.histogram["edges"] == pytest.approx(before.histogram["edges"], abs=1e-5)


class _HalfDetector(Detector):
    """Finds a face in the left half of pictures that are wider than high, and none in others."""

    def __init__(self) -> None:
        self.name = "half.onnx"

    def detect(self, pixels: np.ndarray) -> list[Face]:
        height, width = pixels.shape[:2]
        if width <= height:
            return []
        return [Face(np.array([0.0, 0, height, height]), POINTS, 0.9)]


def test_with_a_detector_photographs_are_cropped(answers: Answers):
    face = decode_rgb(_face(0))
    wide = cv2.imencode(".png", np.concatenate([face, np.zeros_like(face)], axis=1)[:, :, ::-1])[1].tobytes()
    with _served(Answers(answers.embedder, _HalfDetector(), None, None, "")) as page:
        status, found = page.send("/api/verify", wide, wide)
        crop = decode_rgb(base64.b64decode(found["faces"][0].partition(",")[2]))
        assert status == 200 and found["cosine"] == pytest.approx(1, abs=1e-6)
        assert (crop == align(np.concatenate([face, np.zeros_like(face)], axis=1), POINTS, SIZE, smooth=True)).all()
        status, found = page.send("/api/verify", wide, _face(0))
        assert (status, found["picture"]) == (422, 1) and found["error"].startswith("No face was found.")
        assert page.ask("GET", "/api/info")[2]["detector"] == "half.onnx"
        status, found = page.send("/api/search", wide)
        assert (status, found["error"]) == (422, "there is no gallery; start the program with --gallery FILE")


# ---- pictures that are none


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "mpty image (0 bytes)"), (b"hello", "cannot be decoded"), (b"<html>", "cannot be decoded"),
        (_face(0)[:200], "cannot be decoded"), (jpeg(picture(0, SIZE))[:300], "cannot be decoded"),
        (png_of(60000, 60000, b""), "declares 60,000 x 60,000 pixels"), (png_of(30000, 10, b""), "declares 30,000 x 10 pixels"),
        (b"\xff\xd8" + 10_001 * b"\xff\xfe\0\2", "cannot be decoded"),
        (b"\0\0\0\x20ftypheic" + b"\0" * 100, "cannot be decoded"), (jpeg(picture(0, 64)), "no aligned crop of 48 x 48"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_named_and_the_page_goes_on(page: Page, data: bytes, says: str):
    status, found = page.send("/api/verify", _face(0), data)
    assert (status, found["picture"]) == (422, 1) and says in found["error"] and len(found["error"].splitlines()) == 1
    assert page.send("/api/search", data)[1]["picture"] == 0
    assert page.send("/api/verify", _face(0), _face(0))[0] == 200


# ---- requests that no page sends


HOSTS = ("evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", "")
ORIGINS = ("http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "headers",
    [{"Host": name} for name in HOSTS]
    + [{"Origin": name} for name in ORIGINS]
    + [{"Sec_Fetch_Site": site} for site in ("cross-site", "same-site")],
)
def test_another_site_and_another_name_are_refused(page: Page, headers: dict[str, str]):
    given = {name: value.replace("{port}", str(page.port)) for name, value in headers.items()}
    for path, pictures in (("/api/verify", 2), ("/api/search", 1)):
        status, found = page.send(path, *[_face(0)] * pictures, **given)
        assert status == 403 and set(found) == {"error", "picture"}
    for path in ("/api/info", "/gallery/1"):
        assert page.ask("GET", path, **given)[0] == 403
    is_link = "Sec_Fetch_Site" in given
    assert page.ask("GET", "/", **given)[0] == (200 if is_link else 403)  # a link on another site may lead here


def test_the_page_itself_is_served_under_both_its_names(page: Page):
    for name in ("127.0.0.1", "localhost", "LOCALHOST"):
        host = f"{name}:{page.port}"
        given = {"Host": host, "Origin": f"http://{host}".lower(), "Sec_Fetch_Site": "same-origin"}
        assert page.ask("GET", "/", **given)[0] == 200 and page.send("/api/verify", _face(0), _face(1), **given)[0] == 200


def test_a_request_without_a_host_or_with_two_is_refused(page: Page):
    host = f"Host: 127.0.0.1:{page.port}\r\n".encode()
    close = b"Connection: close\r\n\r\n"
    assert b" 403 " in page.raw(b"GET / HTTP/1.0\r\n" + close).splitlines()[0]
    for hosts in (b"", 2 * host):  # HTTP/1.1 itself forbids these
        head, _, body = page.raw(b"GET / HTTP/1.1\r\n" + hosts + close).partition(b"\r\n\r\n")
        assert b" 400 " in head.splitlines()[0] and b"content-type: application/json" in head
        assert json.loads(body) == {"error": "Invalid HTTP request received.", "picture": None}
    assert b" 200 " in page.raw(b"GET / HTTP/1.1\r\n" + host + close).splitlines()[0]


def test_every_answer_forbids_scripts_of_others_frames_and_stores(page: Page):
    policies = []
    for path in ("/", "/", "/api/info", "/gallery/1", "/nothing"):
        _, headers, data = page.ask("GET", path)
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert headers["x-frame-options"] == "DENY" and headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers and "Python" not in headers.get("server", "")
        if path == "/":
            policies.append(headers["content-security-policy"])
            nonce = re.search(r"script-src 'nonce-([\w-]+)'", policies[-1])[1]
            assert data.count(f'nonce="{nonce}"'.encode()) == 2 and b"{{" not in data
    assert policies[0] != policies[1] and "default-src 'none'" in policies[0] and "unsafe" not in policies[0]


def test_the_page_asks_nothing_of_other_machines():
    text = page_server.PAGE.read_text()
    assert set(re.findall(r"https?://[\w.]+", text)) == {"http://www.w3.org"}  # the name of SVG, which nobody fetches
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|onclick=|@import|url\(", text)
    assert text.isascii()


PATHS = "/demo.py /../demo.py //etc/passwd /gallery/ /gallery/0 /gallery/99 /gallery/../api/info /gallery/%31 /gallery/1/ /?x"


@pytest.mark.parametrize("path", [*PATHS.split(), "/gallery/" + "9" * 400, "/api/info?x=1"])
def test_no_other_path_has_anything(page: Page, path: str):
    assert page.ask("GET", path)[0] == 404
    assert page.send(path, _face(0))[0] == 404


@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "HEAD", "TRACE", "PATCH", "GETT", "CONNECT"])
def test_no_other_method_does_anything(page: Page, method: str):
    host = f"{method} / HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nConnection: close\r\n\r\n".encode()
    assert b" 501 " in page.raw(host).splitlines()[0]


FORMS = ("multipart/form-data; boundary=x", "text/plain")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Length": str(page_server.MAX_PICTURE * 2 + 1)}, 413),
        ({"Content_Length": str(page_server.MAX_PICTURE + 1), "Picture_Sizes": f"{page_server.MAX_PICTURE + 1}, 0"}, 413),
        ({"Content_Length": "9" * 12}, 413),
        ({"Content_Length": "9" * 13}, 411),
        *(({"Content_Length": length}, 400) for length in ("-1", "x", "8")),  # the parser refuses two of them
        ({"Content_Length": "8", "Transfer_Encoding": "chunked"}, 411),
        *(({"Content_Length": "8", "Picture_Sizes": sizes}, 400) for sizes in ("4,5", "8", "2,2,4", "-4,12", "4;4")),
        *(({"Content_Length": "8", "Picture_Sizes": "4,4", "Content_Type": kind}, 415) for kind in FORMS),
    ],
)
def test_a_body_is_refused_before_it_is_read(page: Page, headers: dict[str, str], status: int):
    """None of these bodies is ever sent: a server that waited for one would answer after its deadline, not at once."""
    given = {"Content_Type": "application/octet-stream", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items())
    start = time.monotonic()
    said = page.raw(f"POST /api/verify HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n{lines}\r\n".encode(), seconds=10)
    assert f" {status} ".encode() in said.splitlines()[0]
    assert given["Content_Length"] in ("-1", "x") or json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    assert time.monotonic() - start < 8


def test_a_large_body_is_thrown_away_so_that_the_answer_arrives(page: Page):
    """The whole body is on its way; closing at once would make the browser lose the answer."""
    body = bytes(page_server.MAX_PICTURE + 1)
    given = {"Content_Type": "application/octet-stream", "Picture_Sizes": f"{len(body)}, 0"}
    status, _, found = page.ask("POST", "/api/verify", body, **given)
    assert (status, found["picture"]) == (413, 0) and "24 MiB at most" in found["error"]


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    ],
)  # fmt: skip
def test_nonsense_is_refused_and_the_page_goes_on(page: Page, data: bytes, capfd: pytest.CaptureFixture[str]):
    said = page.raw(data)
    assert not said or b" 200 " not in said.splitlines()[0]
    assert page.ask("GET", "/")[0] == 200 and capfd.readouterr().err == ""


# ---- load


class _Slow:
    """Answers after `go`, and counts how many are computed at once."""

    def __init__(self) -> None:
        self.go, self.inside, self.most, self.started = threading.Event(), 0, 0, threading.Semaphore(0)
        self.batcher = Batcher(np.asarray, 1)
        self.embed = self.people = self.enrol = self.forget = self.search

    def about(self) -> dict[str, Any]:
        return {}

    def verify(self, first: bytes, second: bytes) -> dict[str, Any]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.started.release()
        self.go.wait(20)
        self.inside -= 1
        return {"cosine": len(first) + len(second)}

    def search(self, *words: Any) -> dict[str, Any]:
        raise KeyError("a fault of ours, with a \x1b[31m character")

    def gallery_picture(self, number: int) -> bytes | None:
        return None


def test_few_requests_may_be_in_memory_and_each_gets_its_own_answer():
    slow, count = _Slow(), 2 * page_server.MAX_WAITING
    with _served(slow) as page:
        with ThreadPoolExecutor(count) as pool:
            calls = [pool.submit(page.send, "/api/verify", b"a" * number, b"b") for number in range(count)]
            assert slow.started.acquire(timeout=10)
            wait_for(lambda: page.server.routes.waiting >= page_server.MAX_WAITING, 10)  # for all places
            time.sleep(0.3)
            slow.go.set()
        found = [call.result() for call in calls]
        done = [(number, answer["cosine"]) for number, (status, answer) in enumerate(found) if status == 200]
        assert slow.most <= page_server.MAX_WAITING <= len(done) and all(cosine == n + 1 for n, cosine in done)
        refused = [answer for status, answer in found if status == 503]
        assert len(refused) == count - len(done) and refused and "too many pictures are waiting" in refused[0]["error"]
        assert page.send("/api/verify", b"", b"")[0] == 200  # all places are free again


def test_a_fault_of_ours_is_a_line_in_the_terminal_and_no_traceback_on_the_page(capfd: pytest.CaptureFixture[str]):
    with _served(_Slow()) as page:
        status, found = page.send("/api/search", b"x")
        assert (status, found["error"]) == (500, "this failed; the terminal of the program says why")
    said = capfd.readouterr().err
    assert said.startswith("warning: a request failed: KeyError") and len(said.splitlines()) == 1 and "\x1b" not in said


def test_a_slow_client_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    """Byte for byte, so that no single wait is long."""
    monkeypatch.setattr(page_server, "_SECONDS", 0.4)
    with _served(_Slow()) as page:
        begin = time.monotonic()
        with socket.create_connection(("127.0.0.1", page.port), timeout=10) as connection, contextlib.suppress(ConnectionError):
            for _ in range(200):
                connection.sendall(b"G")
                time.sleep(0.02)
        assert time.monotonic() - begin < 3.5
        start = f"POST /api/verify HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nContent-Type: application/octet-stream\r\n"
        said = page.raw(f"{start}Content-Length: 8\r\nPicture-Sizes: 4, 4\r\n\r\nabc".encode())
        assert b" 200 " not in said
        wait_for(lambda: page.server.routes.waiting == 0, 10)


def test_too_many_connections_are_closed_and_the_page_goes_on():
    with _served(_Slow()) as page, contextlib.ExitStack() as stack:
        for _ in range(page_server.MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", page.port)))
        time.sleep(0.3)
        with contextlib.suppress(ConnectionError):
            assert page.raw(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n\r\n".encode()) == b""
        stack.close()
        wait_for(lambda: not page.server.server.server_state.connections, 10)
        assert page.ask("GET", "/")[0] == 200


# ---- the program


def test_the_end_of_an_answer_waits_for_no_acknowledgement(page: Page):
    with socket.create_connection(("127.0.0.1", page.port)):
        wait_for(lambda: page.server.server.server_state.connections, 10)
        (connection, *_) = page.server.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_it_listens_on_the_loopback_address_alone(page: Page):
    assert page.server.socket.getsockname()[0] == "127.0.0.1"


def test_the_program_says_its_address_writes_nothing_and_ends_with_ctrl_c(place: Path):
    command = [sys.executable, "-m", "scripts.deploy.serve", str(place / "face.onnx"), *SETTINGS, "--port", "0"]
    root = Path(__file__).parent.parent
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)
    line = process.stdout.readline()
    port = int(re.fullmatch(r"the page is at http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", line)[1])
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))  # from now on it can write no byte to a file
    status, found = Page(SimpleNamespace(port=port)).send("/api/verify", _face(0), _face(0))
    assert status == 200 and found["cosine"] == pytest.approx(1, abs=1e-6)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "ended\n", "")


def test_ctrl_c_while_the_address_is_printed_ends_the_page_as_later(place: Path, monkeypatch: pytest.MonkeyPatch):
    interrupted_at_first = mock.Mock(side_effect=[KeyboardInterrupt, None])
    monkeypatch.setattr(program, "print", interrupted_at_first, raising=False)
    assert program.main([str(place / "face.onnx"), *SETTINGS, "--port", "0"]) == 0
    said = [call.args[0] for call in interrupted_at_first.call_args_list]
    assert said[0].startswith("the page is at http://127.0.0.1:") and said[1:] == ["ended"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--far", "1e-3"], "--far chooses a threshold of --results or --pairs"),
        (["--set", "lfw"], "--set chooses a threshold of --results or --pairs"),
        (["--results", "{place}/report/results.json", "--set", "x\x1b"], "has no set 'x\\x1b'; it has tiny"),
        (
            ["--results", "{place}/report/results.json", "--far", "1e-3"],
            "no threshold for FAR 1e-3: it needs 1,000 impostor pairs, tiny has 30 at most; thresholds are there for 1e-1",
        ),
        (["--results", "{place}/none.json"], "cannot be read"),
        (["--results", "{place}/tiny.bin"], "not the results of an evaluation"),
        (["--pairs", "{place}/none.bin"], "--pairs: no file"),
        (["--pairs", "{place}/tiny.bin", "--set", "tiny"], "--set chooses one of the sets of --results"),
        (["--gallery", "{place}/none"], "no such gallery"),
        (["--detector", "{place}/none.onnx"], "none.onnx"),
        (["--detector", "{place}/face.onnx"], "no detector that is known here"),
        (["--port", "{port}"], "is in use by another program; choose another"),
    ],
)
def test_what_it_refuses_is_one_line(place: Path, page: Page, more: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    given = [word.replace("{place}", str(place)).replace("{port}", str(page.port)) for word in more]
    assert program.main([str(place / "face.onnx"), *SETTINGS, *([] if "--port" in given else ["--port", "0"]), *given]) == 1
    said = capsys.readouterr().err
    assert says in said and said.splitlines()[-1].startswith("error: ") and "Traceback" not in said


def test_a_gallery_of_another_network_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Gallery.create(tmp_path / "other", Facts("another", "0" * 32, 8, SIZE, "", "largest")).close()
    assert program.main([str(place / "face.onnx"), *SETTINGS, "--port", "0", "--gallery", str(tmp_path / "other")]) == 1
    assert "another network" in capsys.readouterr().err


def test_without_a_network_the_gallerys_is_taken_or_that_of_the_newest_run(
    place: Path, tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = str(place / "face.onnx")
    facts = Facts(answers.embedder.title, answers.embedder.digest, 8, SIZE, "", "largest", path)
    Gallery.create(tmp_path / "people.gallery", facts).close()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    interrupted = SimpleNamespace(port=0, page="http://127.0.0.1:0/", serve=mock.Mock(side_effect=KeyboardInterrupt))
    served: list[Answers] = []
    monkeypatch.setattr(page_server, "PageServer", lambda port, answers, *more: served.append(answers) or interrupted)
    assert program.main([*SETTINGS, "--gallery", "../people.gallery"]) == 0
    assert served[0].embedder.digest == answers.embedder.digest and served[0].gallery._searchers  # read before anybody asks
    assert "no run with a checkpoint in work_dirs; name a run folder" in error_of(program.main([*SETTINGS]), capsys)
    assert "give it as --gallery ../people.gallery" in error_of(program.main([*SETTINGS, "../people.gallery"]), capsys)


def test_the_set_with_the_strictest_threshold_is_taken(place: Path, tmp_path: Path, answers: Answers):
    found = json.loads((place / "report" / "results.json").read_text())
    strict = json.loads(json.dumps(found["tiny"]))
    strict["operating_points"][0]["cosine_threshold"] = 0.999
    sets = {**found, "strict": strict, "large": {**json.loads(json.dumps(found["tiny"])), "num_impostor": 10**6}}
    path = str(tmp_path / "r.json")
    Path(path).write_text(json.dumps(sets))
    for more, name in ((["--far", "1e-1"], "strict"), ([], "strict"), (["--set", "tiny"], "tiny")):
        assert result_of(_options(place, "--results", path, *more), answers.embedder)[0].name == name
    point = sets["large"]["operating_points"][0]
    sets["large"]["operating_points"].append({**point, "target": "1e-6"})  # which it alone has measured
    Path(path).write_text(json.dumps(sets))
    for more, name in (([], "large"), (["--far", "1e-1"], "strict")):
        assert result_of(_options(place, "--results", path, *more), answers.embedder)[0].name == name


def test_the_results_of_the_run_that_is_the_network_are_found(place: Path, tmp_path: Path, answers: Answers):
    shutil.copy(place / "report" / "results.json", tmp_path / "results.json")
    options = _options(place)
    assert result_of(options, answers.embedder) == (None, "")
    options.run = tmp_path
    assert result_of(options, answers.embedder) == (answers.result, "1e-1")
    options.best = True  # the results are of the end
    assert result_of(options, answers.embedder) == (None, "")


def test_missing_packages_are_one_line(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "deploy.serve.server")
    said = error_of(program.main([str(place / "face.onnx"), *SETTINGS, "--port", "0"]), capsys)
    assert "pip install starlette uvicorn" in said


def test_a_threshold_that_no_pair_could_measure_is_not_offered(answers: Answers):
    point = answers.result.points[0]
    guessed = answers.result._replace(points=[point, point._replace(target="1e-6", tar=None)])
    offered = Answers(answers.embedder, None, None, guessed, "1e-1").about()["set"]["points"]
    assert point.tar is not None and [one["far"] for one in offered] == [point.target]


def test_the_page_of_a_moving_average_has_its_numbers(place: Path, tmp_path: Path, answers: Answers):
    found = json.loads((place / "report" / "results.json").read_text())["tiny"]
    (tmp_path / "r.json").write_text(json.dumps({"tiny": found, "ema/tiny": {**found, "num_impostor": 31}}))
    options = _options(place, "--results", str(tmp_path / "r.json"))
    for options.ema, pairs in ((False, 30), (True, 31)):
        result, _ = result_of(options, answers.embedder)
        assert (result.name, result.num_impostor) == ("tiny", pairs)


def test_an_error_of_the_network_has_no_path(answers: Answers):
    asked = Answers(answers.embedder, None, None, None, "")
    asked.batcher = Batcher(mock.Mock(side_effect=ValueError(f"{answers.embedder.title}: it cannot run")), 4)
    with pytest.raises(RefusedError, match=r"^The network fails on this picture: face\.onnx: it cannot run$"):
        asked.embed(_face(0))


def test_threads_of_torch_are_left_as_they_are(answers: Answers):
    before = torch.get_num_threads()
    answers.verify(_face(0), _face(1))
    assert torch.get_num_threads() == before


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless Chromium."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium here; `apt-get install chromium` brings it")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    flags = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=[*flags.split(), "--no-first-run"])
        yield found
        found.close()


def _opened(browser: Any, page: Page, **settings: Any) -> tuple[Any, list[str]]:
    """Return the page in the browser, and a list of what goes wrong there, or is asked of other machines."""
    faults: list[str] = []
    tab = browser.new_page(**settings)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    own = (f"http://127.0.0.1:{page.port}/", "data:", "blob:")
    tab.on("request", lambda request: None if request.url.startswith(own) else faults.append(request.url))
    tab.goto(f"http://127.0.0.1:{page.port}/")
    tab.wait_for_selector("body[data-ready]")
    return tab, faults


def _file(name: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": "image/png", "buffer": data}


def test_a_browser_compares_two_pictures_and_searches_one(browser: Any, page: Page, place: Path):
    tab, faults = _opened(browser, page)
    pictures = tab.locator("#verify-zones input")
    same = [_face(0, 1), _face(0, 2)]
    pictures.nth(0).set_input_files(_file("<b>one</b>.png", same[0]))
    assert "Now the other picture" in tab.locator("#verify-status").inner_text()
    assert tab.locator("#verify-zones b").nth(0).inner_text() == "<b>one</b>.png"
    pictures.nth(1).set_input_files(_file("two.png", same[1]))
    tab.wait_for_selector("#verify-answer .verdict")
    rows = _reference(place, *same)
    assert tab.locator("#verify-answer b").inner_text() == "Same person"
    assert f"cosine {rows[0] @ rows[1]:.3f}" in tab.locator("#verify-answer").inner_text()
    assert f"this pair is at {rows[0] @ rows[1]:.3f}" in tab.locator("#histogram svg").get_attribute("aria-label")
    # another person, dropped instead of chosen
    other = _face(5, 3)
    _drop(tab, "#verify-zones .zone:nth-child(2)", "other.png", other)
    tab.wait_for_selector("#verify-answer .verdict.no")
    assert tab.locator("#verify-answer b").inner_text() == "Different people"
    # a search: the name is text, whatever it contains
    tab.locator("#search-zones input").set_input_files(_file("who.png", _face(1, 30)))
    tab.wait_for_selector("#search-answer li")
    assert tab.locator("#search-answer .name").nth(0).inner_text() == NAMES[1]
    assert tab.locator("#search-answer .verdict b").inner_text() == NAMES[1] and tab.title() == "Same person?"
    tab.wait_for_function("() => [...document.querySelectorAll('#search-answer img')].every((one) => one.naturalWidth === 48)")
    assert tab.locator("#search-answer img").count() == 3
    tab.locator("#search-zones input").set_input_files(_file("who.png", _face(77, 3)))
    tab.wait_for_function("() => document.querySelector('#search-answer .verdict.no b')?.textContent === 'Unknown'")
    assert faults == []
    tab.close()


def _drop(tab: Any, selector: str, name: str, data: bytes) -> None:
    """Drop a file there, as a person does with a mouse."""
    tab.evaluate(
        """([selector, name, data]) => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)), transfer = new DataTransfer();
            transfer.items.add(new File([bytes], name, { type: "image/png" }));
            for (const kind of ["dragenter", "dragover", "drop"])
                document.querySelector(selector).dispatchEvent(
                    new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }""",
        [selector, name, base64.b64encode(data).decode()],
    )


def test_a_browser_says_what_is_wrong_with_a_picture(browser: Any, page: Page, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_server, "MAX_PICTURE", 50_000)
    tab, faults = _opened(browser, page, viewport={"width": 360, "height": 700})
    assert tab.evaluate("document.documentElement.scrollWidth <= 360")  # nothing sticks out on a phone
    assert "aligned already, 48 x 48 or 112 x 112 pixels" in tab.locator("#kind").inner_text()
    pictures = tab.locator("#verify-zones input")
    pictures.nth(0).set_input_files(_file("one.png", _face(0)))
    pictures.nth(1).set_input_files(_file("text.png", b"hello"))
    tab.wait_for_selector("#verify-zones .wrong")
    assert tab.locator("#verify-problem").inner_text().startswith("Second picture: This picture cannot be decoded")
    pictures.nth(1).set_input_files(_file("large.png", b"\0" * 50_001))
    tab.wait_for_function("() => document.querySelector('#verify-problem').textContent.includes('too large')")
    # with the keyboard alone: both places and the threshold can be reached, and each says what it is
    tab.locator("h1").click()
    labels = []
    for _ in range(3):
        tab.keyboard.press("Tab")
        labels.append(tab.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.id"))
    assert labels == ["First picture: choose a picture", "Second picture: choose a picture", "far"]
    assert [fault for fault in faults if "422" not in fault] == []  # Chromium notes every response that is an error
    tab.close()


def test_a_browser_decides_by_the_chosen_threshold(browser: Any, answers: Answers):
    """With results of more pairs there are several; a looser one accepts what a stricter one does not."""
    cosine = answers.verify(_face(0, 1), _face(0, 2))["cosine"]
    result = answers.result
    points = [result.points[0]._replace(cosine=cosine - 0.01), result.points[0]._replace(target="1e-2", cosine=cosine + 0.01)]
    other = Answers(answers.embedder, None, None, result._replace(points=points), "1e-2")
    with _served(other) as page:
        tab, faults = _opened(browser, page)
        for place in (0, 1):
            tab.locator("#verify-zones input").nth(place).set_input_files(_file("x.png", _face(0, 1 + place)))
        tab.wait_for_selector("#verify-answer .verdict.no")
        tab.locator("#far").select_option(index=0)
        tab.wait_for_selector("#verify-answer .verdict.yes")
        assert "No gallery was given" in tab.locator("#search-words").inner_text() and faults == []
        tab.close()
