"""The service as other programs ask it, by httpx: right answers, roles of keys, gathered requests, kills while it enrols."""

import contextlib
import http.client
import importlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from gallery_runs import SIZE, png
from pictures import jpeg, picture
from tiny_detectors import picture as photograph
from tiny_detectors import write_detector
from tiny_networks import TIMES_MATRIX, write_onnx
from tiny_runs import ROOT, Started, error_of, run_module, wait_for

from deploy.gallery.database import Facts
from deploy.gallery.store import Gallery
from deploy.serve.access import Origins
from deploy.serve.answers import Batcher
from deploy.serve.api import CALLS, openapi, public_path
from deploy.serve.server import PAGE
from scripts.deploy import enrol
from scripts.deploy import serve as program

ASK, CHANGE = "a" * 16, "c" * 20
SETTINGS = ["--device", "cpu", "--threads", "1", "--image-size", str(SIZE), "--port", "0"]
NAME = "Zo\u00eb / \u0623\u062d\u0645\u062f 100 %?#"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a network and keys."""
    folder = tmp_path_factory.mktemp("rest")
    matrix = np.random.default_rng(0).normal(size=(8, 48)).astype(np.float32)
    pooled = ("AveragePool", {"kernel_shape": [12, 12], "strides": [12, 12]})
    write_onnx(folder / "face.onnx", [pooled, ("Flatten", {}), TIMES_MATRIX], 8, SIZE, matrix=matrix)
    _write_keys(folder / "keys", f"# ours\nask {ASK}\n\nchange {CHANGE}\n")
    return folder


def _write_keys(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def _served(place: Path, folder: Path, *more: str) -> Iterator[tuple[Started, str]]:
    """Start the program; yield it and its address."""
    arguments = [str(place / "face.onnx"), *SETTINGS, "--gallery", str(folder / "people.gallery"), *more]
    started = Started(program.main, [arguments], Path(tempfile.mkdtemp(dir=folder)))
    try:
        started.wait_until(lambda: "the page is at" in started.said()[0])
        yield started, re.search(r"(https?://[\d.]+:\d+)/", started.said()[0])[1]
    finally:
        if started.is_alive():
            started.send(signal.SIGINT, 0)
        started.wait(30)


@pytest.fixture(scope="module")
def address(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with _served(place, tmp_path_factory.mktemp("served"), "--keys", str(place / "keys")) as (_, found):
        yield found


def _client(address: str, key: str = "", **settings: Any) -> Any:
    """Return a client that somebody else wrote."""
    httpx = pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
    headers = {"Content-Type": "image/png", **({"Authorization": f"Bearer {key}"} if key else {})}
    return httpx.Client(base_url=address, headers=headers, timeout=30, **{"verify": False, **settings})


def _of_schema(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value has the shape of a JSON schema, of the kinds that the description uses."""
    kinds: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    kinds |= {"array": list, "object": dict}
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, kinds[name]) for name in names):
        return False
    if isinstance(value, list):
        return all(_of_schema(one, schema["items"]) for one in value)
    if isinstance(value, dict) and "properties" in schema:
        inner = schema["properties"].items()
        return set(schema["required"]) <= set(value) and all(_of_schema(value[key], one) for key, one in inner)
    return not isinstance(value, dict) or all(_of_schema(one, schema["additionalProperties"]) for one in value.values())


def _embeddings(place: Path, *pictures: bytes) -> np.ndarray:
    """Return the raw embeddings (n, 8) float64 by onnxruntime alone, plain plus mirrored."""
    session = importlib.import_module("onnxruntime").InferenceSession(str(place / "face.onnx"))
    pixels = np.stack([cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1] for data in pictures])
    images = ((pixels.astype(np.float32) - 127.5) / 127.5).transpose(0, 3, 1, 2)
    return sum(
        session.run(None, {"images": np.ascontiguousarray(view)})[0].astype(np.float64) for view in (images, images[..., ::-1])
    )


def test_a_person_is_enrolled_found_and_forgotten_and_each_answer_is_as_described(place: Path, address: str):
    client = _client(address, CHANGE)
    described = client.get("/api/openapi.json").json()
    said: dict[str, Any] = {}

    def ask(method: str, path: str, name: str, data: bytes | None = None, **headers: str) -> Any:
        reply = client.request(method, path, content=data, headers=headers)
        assert reply.status_code == 200, reply.text
        call = next(call for call in CALLS if call.name == name)
        schema = described["paths"][public_path(call)][method.lower()]["responses"]["200"]["content"]["application/json"][
            "schema"
        ]
        assert _of_schema(reply.json(), schema), (name, reply.text)
        said[name] = reply.json()
        return reply.json()

    path, one, other = f"/api/people/{urllib.parse.quote(NAME, safe='')}", png(1), png(2)
    image = ask("POST", path, "enrol", one)["image"]
    assert ask("POST", path, "enrol", one)["image"] is None  # the person has it
    ask("POST", "/api/people/other", "enrol", other)
    assert ask("GET", "/api/people", "people") == {"people": {NAME: 1, "other": 1}}
    found = ask("POST", "/api/search", "search", one)
    assert found["people"][0]["name"] == NAME and found["people"][0]["cosine"] == pytest.approx(1, abs=1e-6)
    assert found["match"] is None  # there is no threshold
    assert client.get(f"/gallery/{image}").content[:4] == b"\x89PNG"
    wide, both = _embeddings(place, one, other)
    answer = ask("POST", "/api/embed", "embed", one)
    # float32 sums of 48 products
    assert answer["norm"] == pytest.approx(np.linalg.norm(wide), rel=1e-5)
    assert answer["embedding"] == pytest.approx((wide / np.linalg.norm(wide)).tolist(), abs=1e-5)
    sizes = {"Picture-Sizes": f"{len(one)}, {len(other)}"}
    cosine = ask("POST", "/api/verify", "verify", one + other, **sizes)["cosine"]
    assert cosine == pytest.approx(wide @ both / np.linalg.norm(wide) / np.linalg.norm(both), abs=1e-5)
    assert ask("GET", "/api/info", "about")["gallery"] == {"people": 2, "images": 2}
    assert said["about"]["network"] == "face.onnx"  # without its folder
    assert ask("GET", "/api/health", "health") == {"status": "ok"}
    assert ask("DELETE", path, "forget") == {"removed": 1}
    assert client.delete(path).status_code == 404 and client.get(f"/gallery/{image}").status_code == 404
    (left,) = [one["image"] for one in ask("POST", "/api/search", "search", other)["people"]]
    assert ask("DELETE", f"/api/images/{left}", "forget_image") == {"removed": 1}
    assert ask("POST", "/api/search", "search", other)["people"] == []
    ask("GET", "/api/openapi.json", "openapi")
    assert set(said) | {"page", "manual", "metrics", "gallery_picture"} == {call.name for call in CALLS}


def test_the_lines_of_the_page_enrol_a_person(place: Path, tmp_path: Path):
    if shutil.which("openssl") is None or shutil.which("curl") is None:
        pytest.skip("the lines need openssl and curl")
    block = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text().partition('echo "change')[2].partition("\n```")[0]
    make, _, ask = f'echo "change{block}'.splitlines()
    (tmp_path / "ann.jpg").write_bytes(jpeg(picture(1, SIZE)))
    subprocess.run(["bash", "-ec", make], cwd=tmp_path, check=True)
    key = (tmp_path / "keys").read_text().split()[1]
    with _served(place, tmp_path, "--keys", str(tmp_path / "keys")) as (_, address):
        command = ask.replace("Bearer KEY", f"Bearer {key}").replace("localhost:8000", address.removeprefix("http://"))
        done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == {"person": "Ann", "image": 1}


def test_each_call_needs_the_role_of_the_table(address: str):
    for call in CALLS:
        path = re.sub(r"{.*?}", "1", call.path)
        for key, roles in (("", ("",)), (ASK, ("", "ask")), (CHANGE, ("", "ask", "change")), ("x" * 16, ("",))):
            reply = _client(address, key).request(call.method, path)
            if call.role in roles:
                assert reply.status_code not in (401, 403), (call, key)
            else:
                assert reply.status_code == (403 if key == ASK else 401) and reply.json()["error"], (call, key)
                assert ("www-authenticate" in reply.headers) == (key != ASK)


@pytest.mark.parametrize("header", ["Basic {}", "Bearer", "Bearer {0} {0}", "bearer{}", "{}"])
def test_a_key_in_another_form_is_none(address: str, header: str):
    assert _client(address).get("/api/people", headers={"Authorization": header.format(CHANGE)}).status_code == 401


def test_the_pages_say_what_there_is(address: str):
    client = _client(address)
    page = client.get("/").text
    assert "Same person?" in page and "with --gallery FILE to search" in page
    manual = client.get("/api").text
    assert all(f"{call.method} {public_path(call)}<" in manual for call in CALLS) and "{{" not in manual


def test_the_description_is_openapi():
    validator = pytest.importorskip("openapi_spec_validator", reason="needs openapi-spec-validator")
    validator.validate(openapi())


def test_without_keys_nobody_changes_a_gallery(place: Path, tmp_path: Path):
    with _served(place, tmp_path, "--keys", str(place / "keys")) as (_, address):
        assert _client(address, CHANGE).post("/api/people/ann", content=png(0)).status_code == 200
    with _served(place, tmp_path) as (_, address):
        client = _client(address)
        assert client.post("/api/search", content=png(0)).json()["people"][0]["name"] == "ann"
        for method, path in (("POST", "/api/people/b"), ("DELETE", "/api/people/ann"), ("DELETE", "/api/images/1")):
            reply = client.request(method, path, content=png(1))
            assert reply.status_code == 403 and "start the program with --keys FILE" in reply.json()["error"]
    with Gallery(tmp_path / "people.gallery") as gallery:
        assert gallery.people() == {"ann": 1}


def test_pictures_and_names_that_cannot_be_enrolled_are_named(address: str):
    client = _client(address, CHANGE)
    for path, data, status, says in (
        ("/api/people/%0A", png(0), 422, "must be printable"), ("/api/people/", png(0), 422, "must be printable"),
        ("/api/people/" + "x" * 300, png(0), 422, "up to 256 letters"), ("/api/people/ann", b"x", 422, "cannot be decoded"),
        ("/api/people/ann?x=1", png(0), 404, "nothing here"), ("/api/people/Zo%EB", png(0), 400, "must be UTF-8"),
        ("/api/images/x", None, 404, "nothing here"),
        ("/api/images/99", None, 404, "the gallery: has no image 99"),
    ):  # fmt: skip
        reply = client.request("POST" if data else "DELETE", path, content=data)
        assert reply.status_code == status and says in reply.json()["error"], path


def test_the_gate_is_that_of_face_enrol(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pictures = {}
    for number, x in enumerate((8, 64, 112, 224)):  # the first and the last face are cut off by the border
        pixels = photograph(200, 240, (x, 96))
        pixels[:60] = cv2.resize(picture(number), (240, 60))
        pictures[f"p{number}"] = cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()
        (tmp_path / "people" / f"p{number}").mkdir(parents=True)
        (tmp_path / "people" / f"p{number}" / "1.png").write_bytes(pictures[f"p{number}"])
    common = [*SETTINGS[:-2], "--detector", str(write_detector(tmp_path / "d.onnx", "scrfd"))]

    def enrolled(name: str, *more: str) -> dict[str, float]:
        assert enrol.main([str(place / "face.onnx"), str(tmp_path / name), str(tmp_path / "people"), *common, *more]) == 0
        with Gallery(tmp_path / name) as gallery:
            return {image.person: image.norm for image in gallery.images()}

    norms = enrolled("all.gallery")
    gate = ["--min-norm", repr(max(norms["p1"], norms["p2"])), "--max-padding", ".2"]
    expected = enrolled("good.gallery", *gate)
    refused = dict(re.findall(r"rejected: (p\d)/1.png: (.+)", capsys.readouterr().out))
    kinds = {word for reason in refused.values() for word in ("--min-norm", "--max-padding") if word in reason}
    assert len(expected) + len(refused) == 4 and expected and len(kinds) == 2
    with _served(place, tmp_path, "--keys", str(place / "keys"), *common, *gate) as (_, address):
        client = _client(address, CHANGE)
        for person, data in pictures.items():
            reply = client.post(f"/api/people/{person}", content=data)
            if person in refused:
                reason = refused[person][:1].upper() + refused[person][1:]
                assert (reply.status_code, reply.json()) == (422, {"error": f"{reason}.", "picture": 0})
            else:
                assert reply.status_code == 200, reply.text
        assert set(client.get("/api/people").json()["people"]) == set(expected)
        assert client.get("/api/info").json()["gate"] == {"min_norm": float(gate[1]), "max_padding": 0.2}


def test_who_asks_sees_no_path(place: Path, tmp_path: Path):
    with _served(place, tmp_path, "--keys", str(place / "keys")) as (_, address):
        client = _client(address, CHANGE)
        client.post("/api/people/ann", content=png(0))
        with Gallery(tmp_path / "people.gallery") as gallery:
            other = gallery.facts._replace(digest="0" * 32, title="/secret/face.onnx")
            gallery.reembed(other, lambda crops: np.ones((len(crops), 8)), lambda images, total: images)
        said = client.get("/api/info").text + client.post("/api/search", content=png(0)).text
        assert "was embedded anew by another network" in said and str(place) not in said and "/secret" not in said


_IN_NODE = """
const real = fetch, [address, keys] = JSON.parse(process.argv[1]), prompted = keys.length;
globalThis.window = { prompt: () => keys.shift() };
globalThis.fetch = (path, options) => real(address + path, options);
URL.createObjectURL = (blob) => `blob:${blob.size}`;
URL.revokeObjectURL = (url) => { revoked.push(url); };
const revoked = [], image = {};
"""


def test_the_page_asks_for_a_key_until_one_is_right_frees_its_pictures_and_says_the_gate(place: Path, tmp_path: Path):
    """The functions of the page in Node.js, with the service itself; the browser's tests do the rest."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js here to run the functions of the page")
    text = PAGE.read_text()
    part = text[text.index('let key = "";') : text.index("class Question")]
    gate = text[text.index("const { min_norm") : text.index("for (const [name, value] of facts)")]
    asked = "const about = await askAbout(); await showEnrolled(image, 1); const before = revoked.length; image.onload();"
    said = "console.log(JSON.stringify([about.network, prompted - keys.length, image.src, before, revoked, facts]));"
    more = ["--min-norm", "1e-3", "--max-padding", ".25"]
    with _served(place, tmp_path, "--keys", str(place / "keys"), *more) as (_, address):
        _client(address, CHANGE).post("/api/people/ann", content=png(0))
        size = len(_client(address, ASK).get("/gallery/1").content)
        given = json.dumps([address, ["\u0623\u20ac" * 8, "wrong", f" {ASK}\n", "none"]])
        script = f"{_IN_NODE}{part}(async () => {{ {asked} const facts = []; {gate} {said} }})();"
        done = subprocess.run([node, "-e", script, given], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *shown, ((_, words),) = json.loads(done.stdout)
    assert shown == ["face.onnx", 3, f"blob:{size}", 0, [f"blob:{size}"]]
    assert words == "a face whose embedding has at least the length 0.001, with at most 25 % of its crop outside the picture"


def _samples(client: Any) -> dict[tuple[str, ...], float]:
    """Return the metrics by name and values of the labels."""
    parser = importlib.import_module("prometheus_client.parser")
    families = parser.text_string_to_metric_families(client.get("/metrics").text)
    return {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}


def test_faces_of_requests_that_come_together_are_embedded_together(place: Path, tmp_path: Path):
    slow = ("MaxPool", {"kernel_shape": [31, 31], "pads": [15] * 4})  # so that others come while it computes
    chain = [slow] * 12 + [("AveragePool", {"kernel_shape": [12, 12], "strides": [12, 12]}), ("Flatten", {}), TIMES_MATRIX]
    write_onnx(tmp_path / "face.onnx", chain, 8, SIZE, matrix=np.eye(8, 48, dtype=np.float32))
    with _served(tmp_path, tmp_path, "--keys", str(place / "keys")) as (_, address), ThreadPoolExecutor(6) as pool:
        client = _client(address, ASK)

        def are_fewer_calls() -> bool:
            done = list(pool.map(lambda person: client.post("/api/embed", content=png(person)).status_code, range(6)))
            found = _samples(client)
            return done == [200] * 6 and found["face_batch_crops_count",] < found["face_batch_crops_sum",]

        wait_for(are_fewer_calls, 30)


def test_metrics_count_what_was_answered(place: Path, tmp_path: Path):
    with _served(place, tmp_path, "--keys", str(place / "keys")) as (_, address):
        client = _client(address, ASK)
        for data in (png(0), png(1), b"x"):
            client.post("/api/embed", content=data)
        _client(address).get("/nothing")
        samples = _samples(client)
    assert samples["face_requests_total", "200", "embed"] == 2 and samples["face_requests_total", "422", "embed"] == 1
    assert samples["face_requests_total", "404", "nothing"] == 1 and samples["face_request_seconds_count", "embed"] == 3
    assert samples["face_batch_crops_sum",] == 2 and samples["face_waiting",] == 0


def test_another_machine_may_ask_with_a_key_under_any_name(place: Path, tmp_path: Path):
    with _served(place, tmp_path, "--keys", str(place / "keys"), "--host", "0.0.0.0") as (started, address):
        port = address.rpartition(":")[2]
        client = _client(f"http://127.0.0.2:{port}", ASK)
        for headers, status in (
            ({}, 200), ({"Host": "faces.example"}, 200), ({"Host": "faces.example", "Origin": "https://faces.example"}, 200),
            ({"Host": "faces.example", "Origin": "https://evil.example"}, 403), ({"Sec-Fetch-Site": "cross-site"}, 403),
        ):  # fmt: skip
            assert client.get("/api/people", headers=headers).status_code == status, headers
        assert "keys and pictures are not encrypted" in started.said()[1]


def test_with_a_certificate_it_is_encrypted(place: Path, tmp_path: Path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate")
    names = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem"), "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=faces", *names]
    subprocess.run(command, check=True, capture_output=True)
    more = ["--keys", str(place / "keys"), "--tls", str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")]
    with _served(place, tmp_path, *more) as (_, address):
        assert address.startswith("https://")
        ssl = importlib.import_module("ssl")
        with _client(address, CHANGE, verify=ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))) as client:
            headers = {"Origin": address, "Sec-Fetch-Site": "same-origin"}  # of the page
            assert client.post("/api/people/ann", content=png(0), headers=headers).json() == {"person": "ann", "image": 1}
            assert client.get("/api/health", headers={"Origin": address.replace("https", "http")}).status_code == 403


@pytest.mark.parametrize(
    ("keys", "more", "says"),
    [
        (f"ask {ASK}\n", ["--host", "192.0.2.1"], "--host: 192.0.2.1 is no address of this machine"),
        (f"ask {ASK}\n", ["--host", "no such host"], "--host: no such host is no address of this machine"),
        (f"ask {ASK}\n", ["--tls", "{place}/keys", "{place}/keys"], "--tls: the certificate or its key is no PEM file"),
        (f"ask {ASK}\n", ["--tls", "none", "none"], "--tls: the certificate or its key is no PEM file"),
        (f"ask {ASK}\n", [], "no such gallery"),  # only a key that may change makes one
        (None, ["--min-norm", "1"], "--min-norm is of pictures that are enrolled; give --gallery, and --keys"),
        (f"ask {ASK}\n", ["--max-padding", "0"], "--max-padding is of pictures that are enrolled"),
        (None, ["--host", "0.0.0.0"], "--host: other machines may ask only with keys"),
        ("\n# none\n", [], "has no key"),
        ("ask short\n", [], "line 1 of"),
        (f"ask {ASK}\nall {ASK}\n", [], "line 2 of"),
        (f"ask {ASK}\nchange {ASK}\n", [], "gives a key another role than before"),
        (f"ask {ASK} mine\n", [], "must be `ask KEY` or `change KEY`"),
        ("ask " + "\xe4" * 20, [], "must be `ask KEY` or `change KEY`"),
        (f"ask {ASK}\n", ["chmod"], "other users may read"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    place: Path, tmp_path: Path, keys: str | None, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    given = [] if keys is None else ["--keys", str(_write_keys(tmp_path / "keys", keys))]
    if more == ["chmod"]:
        (tmp_path / "keys").chmod(0o640)
        more = []
    gallery = ["--gallery", str(tmp_path / "people.gallery")] if says == "no such gallery" else []
    words = [word.replace("{place}", str(place)) for word in more]
    said = error_of(program.main([str(place / "face.onnx"), *SETTINGS, *given, *gallery, *words]), capsys)
    assert says in said and ASK not in said


def test_what_was_confirmed_before_a_kill_is_there(place: Path, tmp_path: Path):
    """Four clients enrol while the program is killed: each picture that was confirmed is whole, and no other is half there."""
    rounds = int(os.environ.get("FACE_KILLS", "2"))
    confirmed: dict[str, int] = {}
    for turn in range(rounds):
        with _served(place, tmp_path, "--keys", str(place / "keys")) as (started, address):
            host = address.removeprefix("http://")
            enough = threading.Event()

            def enrol(first: int, host: str = host, enough: threading.Event = enough, least: int = 3 * (turn % 5)) -> None:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    for number in range(first, first + 1000):
                        connection = http.client.HTTPConnection(host, timeout=20)
                        headers = {"Authorization": f"Bearer {CHANGE}", "Content-Type": "application/octet-stream"}
                        connection.request("POST", f"/api/people/p{number}", png(number), headers)
                        reply = connection.getresponse()
                        answer = json.loads(reply.read())
                        if reply.status == 200:
                            confirmed[answer["person"]] = answer["image"]
                        if number > first + least:
                            enough.set()

            with ThreadPoolExecutor(4) as pool:
                tasks = [pool.submit(enrol, 10_000 * (4 * turn + one)) for one in range(4)]
                assert enough.wait(30)
                started.send(signal.SIGKILL, 0)
                for task in tasks:
                    task.result()
            assert started.wait(30).returncode == -signal.SIGKILL
    with Gallery(tmp_path / "people.gallery") as gallery:
        people = {image.person: image.number for image in gallery.images()}
        assert gallery.check() == len(people) and confirmed.items() <= people.items() and len(confirmed) >= 4 * rounds


def test_a_short_attack_finds_nothing(tmp_path: Path):
    done = Started(run_module, [["tests.attack.service", "--minutes", "0.05"]], tmp_path, place=str(ROOT)).wait(300)
    assert (done.returncode, done.stderr) == (0, "") and "; 0 finds" in done.stdout, done


# ---- parts


def test_requests_that_wait_are_embedded_together_and_each_gets_its_own_rows():
    going, calls = threading.Event(), []

    def embed(crops: np.ndarray) -> np.ndarray:
        calls.append(len(crops))
        going.wait(10)
        if (crops == 13).any():
            raise ValueError("13")
        return crops[:, :1] * 2.0

    batcher = Batcher(embed, 4)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(batcher, np.array([[1.0]]))
        while not calls:
            pass
        others = []
        for count, (size, value) in enumerate(((2, 5.0), (1, 7.0), (1, 13.0), (6, 9.0), (1, 4.0))):
            others.append(pool.submit(batcher, np.full((size, 1), value)))
            while len(batcher._waiting) <= count:  # the threads arrive in this order
                pass
        going.set()
        assert first.result(10) == 2
        assert [others[place].result(10).ravel().tolist() for place in (0, 1, 3, 4)] == [[10] * 2, [14], [18] * 6, [8]]
        with pytest.raises(ValueError, match="13"):
            others[2].result(10)
    # four at once at most, but for what is larger itself; those that fail are embedded again, each alone
    assert calls == [1, 4, 2, 1, 1, 6, 1]


def test_the_port_of_a_scheme_may_be_left_out():
    names = {"127.0.0.1", "127.0.0.1:80", "localhost", "localhost:80"}
    assert Origins("127.0.0.1", 80).hosts == names


def test_a_supervisor_is_answered_while_another_process_holds_the_gallery(place: Path, tmp_path: Path):
    with _served(place, tmp_path, "--keys", str(place / "keys")) as (_, address), ThreadPoolExecutor(44) as pool:
        other = sqlite3.connect(tmp_path / "people.gallery", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with _client(address, CHANGE) as client:
            enrolled = pool.submit(client.post, "/api/people/ann", content=png(0))
            time.sleep(0.5)  # it waits for the other process, and those below for it
            # more than there are threads for answers
            readers = [pool.submit(_client(address, ASK).get, "/api/people") for _ in range(42)]
            time.sleep(1.5)
            assert _client(address).get("/api/health", timeout=5).status_code == 200
            assert _client(address, ASK).get("/metrics", timeout=5).status_code == 200
            other.execute("ROLLBACK")
            answer = enrolled.result(30)
            if answer.status_code == 503:  # it waits for five seconds at most, and on a busy machine all this takes longer
                answer = _client(address, CHANGE).post("/api/people/ann", content=png(0))
            assert answer.status_code == 200 and all(reader.result(30).status_code == 200 for reader in readers)
        other.close()


def test_a_gallery_that_vanishes_is_told_in_the_terminal(place: Path, tmp_path: Path):
    with _served(place, tmp_path, "--keys", str(place / "keys")) as (started, address):
        client = _client(address, CHANGE)
        client.post("/api/people/ann", content=png(0))
        assert client.post("/api/search", content=png(0)).json()["people"][0]["name"] == "ann"
        (tmp_path / "people.gallery").unlink()
        asked = [client.get("/api/people"), client.post("/api/search", content=png(0)), client.get("/gallery/1")]
        assert [reply.status_code for reply in asked] == [500] * 3
        assert started.said()[1].count("warning: a request failed: FileNotFoundError") == 3
        with Gallery.create(tmp_path / "people.gallery", Facts("another", "0" * 32, 8, SIZE, "", "largest")):
            reply = client.post("/api/search", content=png(0))
            assert (reply.status_code, "the gallery: is another file" in reply.json()["error"]) == (422, True)
