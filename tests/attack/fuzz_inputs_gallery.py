"""Inputs of scripts.deploy that somebody else may have made: galleries, detectors, requests, results, fields of a card."""

import argparse
import contextlib
import json
import select
import socket
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import cv2
import yaml

from deploy.embed.embedder import open_embedder
from deploy.gallery.store import Gallery
from deploy.serve.answers import Answers
from eval.networks import add_network_arguments
from tests.tiny_detectors import FORMS, picture, write_detector
from utils.program import run_main

from .fuzz_files import Case, Entry, Fifo, Folder, Link
from .fuzz_grammar import TEXTS, Rng, change_tree, damage, pick
from .fuzz_inputs import Input, Maker, Sound
from .fuzz_seeds import CHECKPOINT, files_below

_DATABASE = "g.gallery"
_COMMANDS = (
    ["scripts.deploy.search", "runs/tiny", "g.gallery", "people", "--labelled", "--sheet", "sheet.png", "--json", "found.json"],
    ["scripts.deploy.search", "runs/tiny", "g.gallery", "people", "--by", "template", "--threshold", "0.5"],
    ["scripts.deploy.enrol", "runs/tiny", "g.gallery", "people"],
    ["scripts.deploy.gallery", "show", "g.gallery", "--people", "--images", "--json", "shown.json"],
    ["scripts.deploy.gallery", "check", "g.gallery"],
    ["scripts.deploy.search", "g.gallery", "people"],
    ["scripts.deploy.gallery", "remove", "g.gallery", "--image", "1"],
    ["scripts.deploy.gallery", "reembed", "g.gallery", "runs/tiny"],
)
_COLUMNS = {
    "facts": "title digest embedding_size image_size detector which network_path detector_path id",
    "people": "id name",
    "images": "id person picture hash face norm quality added vector_sum vector",
    "faces": "image face_sum png",
    "sqlite_sequence": "seq",
}
_VALUES = ("-1", "0", "1", "2", "9223372036854775807", "1e308", "NULL", "'x'", "x'00'", "char(27) || '[2J'", "zeroblob(70000)",
           "CAST(x'ff' AS TEXT)", "'../canary'", "99999999", "0.5")  # fmt: skip
_CHANGES = (
    "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = 'CREATE TABLE people (id, name)' WHERE name = 'people'",
    "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET rootpage = 2",
    "CREATE TRIGGER t AFTER INSERT ON images BEGIN DELETE FROM people; END",
    "CREATE VIEW v AS SELECT 1",
    "DELETE FROM people",
    "DELETE FROM facts",
    "DELETE FROM images",
    "DELETE FROM faces",
    "UPDATE images SET vector = (SELECT png FROM faces)",
    "INSERT INTO faces VALUES (99, x'00', x'00')",
    "UPDATE facts SET network_path = '/dev/zero'",
    "PRAGMA user_version = 7",
)
_NAMES = ("-journal", "-wal", "-shm")
_RESULTS, _FIELDS = "r.json", "card/card.yaml"
_OF_SET: dict[str, Any] = {
    "accuracy": 0.9,
    "eer": 0.1,
    "auc": 0.95,
    "num_genuine": 20,
    "num_impostor": 20,
    "operating_points": [
        {"target": "1e-1", "tar": 0.9, "far": 0.1, "cosine_threshold": 0.3, "num_accepted": 2},
        {"target": "1e-2", "tar": None, "far": None, "cosine_threshold": None, "num_accepted": 0},
    ],
    "intervals_95": {"accuracy": [0.8, 0.95], "1e-1": [0.7, 0.95], "auc": None},
    "roc": {"far": [0.0, 0.1, 1.0], "tar": [0.5, 0.9, 1.0]},
    "similarities": {"cosine": [-1.0, 0.0, 1.0], "genuine": [2, 18], "impostor": [15, 5]},
}
_RATES = {"lfw": _OF_SET, "ema/lfw": _OF_SET}
_KEYS = ("intended_use", "limits", "contact")
_CARD = ["scripts.deploy.card", "runs/tiny", "--results", _RESULTS, "--out", "card"]
_VERIFY = ["scripts.deploy.verify", "runs/tiny", "people/p0/0.jpg", "people/p1/0.jpg", "--far", "1e-1", "--results", _RESULTS]
_REQUEST, _DETECTOR = "request", "detector.onnx"
_HEADERS = {
    "Host": ("127.0.0.1:PORT", "localhost:PORT", "127.0.0.1", "evil.example", "", "127.0.0.1:PORT\r\nHost: evil.example"),
    "Origin": ("http://127.0.0.1:PORT", "http://evil.example", "null", "\xff"),
    "Sec-Fetch-Site": ("same-origin", "cross-site", "none"),
    "Content-Type": ("application/octet-stream", "text/plain", "multipart/form-data; boundary=x", ""),
    "Content-Length": ("LENGTH", "0", "-1", "1e3", "99999999999999999999", "+7", "LENGTH, LENGTH", "\xb2"),
    "Transfer-Encoding": ("chunked", "gzip, chunked"),
    "Picture-Sizes": ("FIRST, SECOND", "FIRST", "0, LENGTH", "-1, 5", "1e9, 1", "", "9" * 5000, "\xb2, \xb3", "1, 2, 3"),
    "Expect": ("100-continue", "x"),
    "Connection": ("close", "Upgrade"),
    "Upgrade": ("websocket", "h2c"),
}
_PATHS = ("/", "/api/info", "/api/search", "/api/verify", "/api/embed", "/api/people", "/api/people/a%41%2F%00", "/metrics",
          "/gallery/1", "/gallery/99999999999999999999999", "/gallery/%2e%2e", "/gallery/../canary", "/gallery/\xb2",
          "http://evil.example/", "*", "//", "/api/info?" + "a" * 70000)  # fmt: skip


def requests(words: list[str]) -> int:
    """Send bytes to the service of the page, in which PORT is its port; an error of the client's is a refusal."""
    return run_main(lambda: _serve(Path(words[0]).read_bytes()))


def _serve(request: bytes) -> None:
    from deploy.serve.server import PageServer

    parser = argparse.ArgumentParser()
    add_network_arguments(parser, newest=True)
    answers = Answers(open_embedder(parser.parse_args(["runs/tiny"])), None, Gallery(Path(_DATABASE)), None, "")
    page = PageServer(0, answers)
    thread = threading.Thread(target=page.serve)
    thread.start()
    while not page.server.started:
        time.sleep(0.001)
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", page.port), timeout=10) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(request.replace(b"PORT", str(page.port).encode()))
            ended = False
            while not ended:
                if not select.select([connection], [], [], 1)[0]:
                    connection.shutdown(socket.SHUT_WR)  # it waits for the rest, also behind "100 Continue"
                part = connection.recv(1 << 16)
                answer, ended = answer + part, not part
    finally:
        page.server.should_exit = True
        thread.join()
    if b"HTTP/1.1 500 " in answer:
        raise RuntimeError(answer)
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise ValueError(f"refused: {answer[:20]!r}")


def inputs(seeds: Path) -> dict[str, Input]:
    """Return the inputs by name, from the seeds of fuzz_seeds.make_seeds."""
    run = {name: data for name, data in files_below(seeds / "run").items() if name.startswith(CHECKPOINT)}
    crops = {f"people/{file}": data for file, data in files_below(seeds / "people").items()}
    gallery = {_DATABASE: (seeds / _DATABASE).read_bytes()}
    card = {_FIELDS: b"contact: a@b.example\n", _RESULTS: json.dumps(_RATES).encode()}
    found = {
        "gallery": Input({**run, **crops, **gallery}, [_database, _files], 700, 5),
        "results": Input({**run, **crops, **card}, [_results, _fields], 700, 5),
        "requests": Input({**run, **crops, **gallery}, [_request], 700, 5),
    }
    with contextlib.suppress(ImportError):  # without the package onnx nothing reads a detector
        forms = [write_detector(seeds / f"{form}.onnx", form).read_bytes() for form in FORMS]
        photograph = {"people/p.png": cv2.imencode(".png", picture(160, 160, (72, 72))[..., ::-1])[1].tobytes()}
        found["detector"] = Input({**crops, **photograph, _DETECTOR: forms[0]}, [_detector(forms)], 700, 5)
    return found


def _request(sound: Sound, rng: Rng) -> Case:
    """Return a case with a request of one or two pictures, of which a few things are wrong."""
    pictures = [bytes(sound[f"people/p{person}/0.jpg"] or b"") for person in range(2)]  # type: ignore[arg-type]
    path = str(pick(rng, _PATHS)) if rng.random() < 0.3 else str(pick(rng, ("/api/search", "/api/verify")))
    sent = [damage(one, pictures, rng) if rng.random() < 0.3 else one for one in pictures[: 1 + (path == "/api/verify")]]
    chosen = {name: values[0] for name, values in _HEADERS.items() if name not in ("Transfer-Encoding", "Expect", "Upgrade")}
    for _ in range(int(rng.integers(3))):
        name = str(pick(rng, sorted(_HEADERS)))
        chosen[name] = str(pick(rng, _HEADERS[name]))
    head = f"{pick(rng, ('POST', 'POST', 'POST', 'GET', 'HEAD', 'X'))} {path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {text}\r\n" for name, text in chosen.items() if rng.random() < 0.98)
    for word, number in (("LENGTH", sum(map(len, sent))), ("FIRST", len(sent[0])), ("SECOND", len(sent[-1]))):
        head = head.replace(word, str(number))
    data = head.encode("latin-1") + b"\r\n" + b"".join(sent)
    return Case(
        ["tests.attack.fuzz_inputs_gallery:requests", _REQUEST],
        {_REQUEST: damage(data, [], rng) if rng.random() < 0.2 else data},
    )


def _detector(forms: list[bytes]) -> Maker:
    """Return a maker of detectors whose file is damaged, or whose graph has false numbers, names, or outputs."""

    def make(sound: Sound, rng: Rng) -> Case:
        import onnx

        data = pick(rng, forms)
        if rng.random() < 0.3:
            data = damage(data, forms, rng)
        else:
            model = onnx.load_from_string(data)
            for _ in range(int(rng.geometric(0.6))):
                kind, graph = int(rng.integers(5)), model.graph
                if kind == 0:
                    constant = pick(rng, graph.initializer)
                    constant.raw_data = (
                        damage(constant.raw_data, [], rng) if rng.random() < 0.5 else rng.bytes(len(constant.raw_data))
                    )
                elif kind == 1:
                    dims = pick(rng, [*graph.input, *graph.output]).type.tensor_type.shape.dim
                    if dims:
                        pick(rng, dims).dim_value = int(pick(rng, (0, 1, 7, 2**31, 2**62, -1)))
                elif kind == 2 and graph.output:
                    del graph.output[int(rng.integers(len(graph.output)))]
                elif kind == 3:
                    pick(rng, graph.node).op_type = str(pick(rng, ("Identity", "Exp", "Loop", "nothing", "Expand", "Sqrt")))
                else:
                    pick(rng, [*graph.input, *graph.output, *graph.node]).name = str(
                        pick(rng, ("", "x", "../canary", "\x1b[2J"))
                    )
            data = model.SerializeToString()
        return Case(["scripts.deploy.detect", "people", "out", "--detector", _DETECTOR], {_DETECTOR: data})

    return make


def _database(sound: Sound, rng: Rng) -> Case:
    """Return a case whose database is a valid one of SQLite with false contents, or a damaged one."""
    data = bytes(sound[_DATABASE] or b"")  # type: ignore[arg-type]
    if rng.random() < 0.3 or not hasattr(sqlite3.Connection, "deserialize"):  # Python 3.10 has not
        data = damage(data, [data], rng) if rng.random() < 0.7 else data[: int(rng.integers(len(data)))]
    else:
        database = sqlite3.connect(":memory:", isolation_level=None)
        database.deserialize(data)
        for _ in range(int(rng.geometric(0.6))):
            table = str(pick(rng, sorted(_COLUMNS)))
            column = str(pick(rng, _COLUMNS[table].split()))
            change = f"UPDATE OR IGNORE {table} SET {column} = {pick(rng, _VALUES)} WHERE rowid = {int(rng.integers(1, 3))}"
            try:
                database.executescript(str(pick(rng, _CHANGES)) if rng.random() < 0.3 else change)
            except sqlite3.Error:  # a rule of the table, or what an earlier change broke
                continue
        data = database.serialize()
        database.close()
    return Case(list(pick(rng, _COMMANDS)), {_DATABASE: data})


def _files(sound: Sound, rng: Rng) -> Case:
    """Return a case with an odd file as the gallery, and journals that SQLite would play back."""
    files: dict[str, Entry] = {}
    if rng.random() < 0.4:
        end = len(b"../canary").to_bytes(4, "big") + sum(b"../canary").to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
        journal = bytes.fromhex("d9d505f920a163d7") + rng.bytes(600)
        chosen = pick(rng, (journal, journal + b"../canary" + end, rng.bytes(40), b"", Link("../canary"), Fifo()))
        files[f"{_DATABASE}{pick(rng, _NAMES)}"] = chosen
    if rng.random() < 0.4:
        files[_DATABASE] = pick(rng, (None, b"", Fifo(), Folder(), Link("../canary"), Link("/dev/zero"), rng.bytes(5000)))
    return Case(list(pick(rng, _COMMANDS)), files)


def _results(sound: Sound, rng: Rng) -> Case:
    """Return a case with well-formed results of wrong values, or damaged ones."""
    data = bytes(sound[_RESULTS] or b"")  # type: ignore[arg-type]
    kind = rng.random()
    if kind < 0.7:
        data = json.dumps(change_tree(_RATES, rng)).encode()
    elif kind < 0.8:
        data = pick(rng, (b"", b"null", b"[]", b"[" * 5000, b'{"lfw": ' + b"9" * 5000 + b"}", b'{"\\ud800": {}}'))
    else:
        data = damage(data, [data], rng)
    return Case(list(_CARD if rng.random() < 0.3 else _VERIFY), {_RESULTS: data})


def _fields(sound: Sound, rng: Rng) -> Case:
    """Return a case with odd texts of a card, or a damaged file of them."""
    texts = {str(key): pick(rng, (*TEXTS, "<script>x</script>", "# a\n| b |", "![x](/etc/passwd)")) for key in _KEYS}
    try:
        data = yaml.safe_dump(change_tree(texts, rng), allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError, ValueError):
        data = b"contact: &a [*a]\n"
    return Case(list(_CARD), {_FIELDS: damage(data, [data], rng) if rng.random() < 0.3 else data})
