"""Attack `face serve` as it runs: python -m tests.attack.service --minutes 60

The service runs in a process of its own, with a new gallery and keys. Slow, huge, malformed, unauthorised and interrupted
requests come beside honest ones, from many threads at once. What must hold: an honest answer is right, or 503; nobody without a
key learns or changes anything; the process lives, says nothing on stderr, and its memory, threads and files stay bounded; at
the end the gallery is whole and has exactly those whom an answer confirmed, or whose answer was lost.
"""

import argparse
import contextlib
import http.client
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from safetensors.torch import save_file

from backbones import build_backbone
from deploy.gallery.store import Gallery
from tests.pictures import png_of

ROOT = Path(__file__).parents[2]
ASK, CHANGE = "a" * 16, "c" * 16
_SIZE = 112
_MAX_RSS = 3 << 30  # bytes: two bombs of 64 million pixels, and 16 requests of 48 MiB
_OCTETS = {"Content-Type": "application/octet-stream"}
_CALLS = ("GET /metrics", "GET /api/info", "GET /api/people", "GET /gallery/1", "POST /api/verify", "POST /api/search",
          "POST /api/embed", "POST /api/people/x", "DELETE /api/people/x", "DELETE /api/images/1")  # fmt: skip


class Attack:
    """One service under attack: a folder for its gallery and keys, and the words of a command line that name its network."""

    def __init__(self, folder: Path, network: list[str], seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.done: Counter[str] = Counter()
        self.finds: list[str] = []
        self.ended = threading.Event()
        self.seconds: list[float] = []  # of honest requests
        # person -> whether an answer said that the person is there; None = the answer was lost
        self.people: dict[str, bool | None] = {}
        (folder / "keys").write_text(f"ask {ASK}\nchange {CHANGE}\n")
        (folder / "keys").chmod(0o600)
        words = [*network, "--gallery", str(folder / "people.gallery"), "--keys", str(folder / "keys"), "--port", "0"]
        command = [sys.executable, "-m", "scripts.deploy.serve", *words]
        self.errors = open(folder / "stderr", "w+")  # noqa: SIM115, closed with the process
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rpartition(":")[2].partition("/")[0])

    def ask(self, call: str, data: bytes = b"", key: str = CHANGE, **headers: str) -> tuple[int, Any]:
        """Return status and answer of a request such as `GET /api/info`."""
        method, path = call.split()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        given = {**_OCTETS, **({"Authorization": f"Bearer {key}"} if key else {}), **headers}
        try:
            connection.request(method, path, data, given)
            reply = connection.getresponse()
            text = reply.read()
            return reply.status, json.loads(text) if reply.headers["content-type"] == "application/json" else text
        finally:
            connection.close()

    def honest(self, dice: random.Random) -> None:
        """Enrol, search, verify, remove: each answer is right, or says that too many wait."""
        number = dice.randrange(10**9)
        one, other = _picture(number), _picture(number + 1)
        person, begun = f"p{number}", time.monotonic()
        self.people[person] = None
        status, found = self.ask(f"POST /api/people/{person}", one)
        if status == 200:
            self.people[person] = True
        self.expect(status == 503 or found["person"] == person, f"enrol: {status} {found}")
        if self.people[person]:
            status, found = self.ask("POST /api/search", one, ASK)
            best = found.get("people", [{}])[0]
            self.expect(status == 503 or best["cosine"] > 0.9999, f"search: {status} {str(found)[:300]}")
        sizes = {"Picture-Sizes": f"{len(one)},{len(other)}"}
        status, found = self.ask("POST /api/verify", one + other, ASK, **sizes)
        self.expect(status == 503 or -1 <= found["cosine"] <= 0.99999, f"verify: {status} {str(found)[:300]}")
        if self.people[person] and dice.random() < 0.5:
            self.people[person] = None
            status, found = self.ask(f"DELETE /api/people/{person}")
            self.expect(found == {"removed": 1}, f"remove: {status} {found}")
            self.people[person] = False
        self.seconds.append(time.monotonic() - begun)

    def unauthorised(self, dice: random.Random) -> None:
        """Ask everything without a key, with a wrong one, and with one that may only ask."""
        for call in _CALLS:
            key = dice.choice(("", "x" * 16, CHANGE[:-1], CHANGE + "c", ASK))
            changes = call.startswith("DELETE") or call == "POST /api/people/x"
            if key != ASK or changes:
                status, found = self.ask(call, dice.choice((b"", _picture(1))), key)
                self.expect(status == (403 if key == ASK else 401), f"unauthorised: {call} {key!r} {status} {found!r:.200}")

    def huge(self, dice: random.Random) -> None:
        """Send too much, promise too much, or a small file that is a large picture."""
        kind = dice.randrange(4)
        if kind == 0:
            status, _ = self.ask("POST /api/search", bytes(25 << 20), ASK)
            self.expect(status == 413, f"huge: {status}")
        elif kind == 1:
            status, found = self.ask("POST /api/search", dice.choice((_png(8000, 7999), _png(30000, 2000))), ASK)
            self.expect(status in (422, 503), f"bomb: {status} {found!r:.200}")
        elif kind == 2:
            status, found = self.ask("POST /api/embed", dice.randbytes(24 << 20), ASK)
            self.expect(status in (422, 503), f"noise: {status} {found!r:.200}")
        else:
            self.send(b"POST /api/search HTTP/1.1\r\n" + self.head() + b"Content-Length: 20000000\r\n\r\n" + bytes(1 << 20))

    def malformed(self, dice: random.Random) -> None:
        """Send what is no request, or half of one, or several at once."""
        good = b"POST /api/search HTTP/1.1\r\n" + self.head() + b"Content-Length: %d\r\n\r\n" % len(_picture(1)) + _picture(1)
        data = bytearray(good * dice.choice((1, 1, 3)))
        for _ in range(dice.randrange(1, 30)):
            data[dice.randrange(dice.choice((len(data), 200)))] = dice.randrange(256)
        self.send(bytes(data[: dice.randrange(len(data))]) if dice.random() < 0.5 else bytes(data))

    def slow(self, dice: random.Random) -> None:
        """Send a head or a body byte for byte, or take no answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            start = b"POST /api/search HTTP/1.1\r\n" + self.head()
            connection.sendall(dice.choice((b"", start, start + b"Content-Length: 1000\r\n\r\n")))
            until = time.monotonic() + dice.choice((2, 40))
            while time.monotonic() < until and not self.ended.is_set():
                connection.sendall(b"x")
                time.sleep(0.1)

    def crowd(self, dice: random.Random) -> None:
        """Hold many connections open and say nothing."""
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=60))
            self.ended.wait(dice.choice((0.1, 3)))

    def head(self) -> bytes:
        """Return the headers that let a request in."""
        key = f"Authorization: Bearer {ASK}\r\n" if random.random() < 0.8 else ""
        return f"Host: 127.0.0.1:{self.port}\r\n{key}Content-Type: application/octet-stream\r\n".encode()

    def send(self, data: bytes) -> None:
        """Send bytes, and read some of what comes back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(data)
            connection.settimeout(2)
            said = connection.recv(1 << 16)
            self.expect(b" 500 " not in said[:20] and b"Traceback" not in said, f"answered {said[:200]!r} to {data[:300]!r}")

    def expect(self, holds: bool, words: str) -> None:
        """Note a find unless something holds."""
        if not holds:
            self.finds.append(words)

    def run(self, seconds: float) -> None:
        """Attack from threads for so long, then end the service and compare the gallery."""
        kinds: list[Callable[[random.Random], None]] = [self.honest, self.unauthorised, self.huge, self.malformed, self.slow]
        kinds += [self.honest, self.malformed, self.slow, self.crowd]
        threads = [threading.Thread(target=self._repeat, args=(kind, number)) for number, kind in enumerate(kinds)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + seconds
        most = dict.fromkeys(("VmRSS", "Threads", "files"), 0)
        while time.monotonic() < until and self.process.poll() is None:
            most = {name: max(most[name], value) for name, value in self.state().items()}
            time.sleep(0.5)
        self.ended.set()
        for thread in threads:
            thread.join()
        self.expect(self.process.poll() is None, f"it ended with {self.process.returncode}")
        self.expect(most["VmRSS"] < _MAX_RSS and most["Threads"] < 100 and most["files"] < 200, f"it grew: {most}")
        self.process.send_signal(signal.SIGINT)
        out, _ = self.process.communicate(timeout=60)
        self.errors.seek(0)
        # libpng writes its own lines about damaged files
        said = [line for line in self.errors.read().splitlines() if not line.startswith(("warning: keys", "libpng "))]
        self.expect((out, said, self.process.returncode) == ("ended\n", [], 0), f"it ended with {out} {said[:5]}")
        with Gallery(self.folder / "people.gallery") as gallery:
            there = set(gallery.people())
            gallery.check()
        wrong = [person for person, known in self.people.items() if known is not None and known != (person in there)]
        self.expect(not wrong and there <= set(self.people), f"{len(wrong)} people are not as confirmed: {wrong[:5]}")
        self.seconds.sort()
        middle, last = (self.seconds[int(share * (len(self.seconds) - 1))] for share in (0.5, 0.99)) if self.seconds else (0, 0)
        print(f"{dict(self.done)}; honest rounds: median {middle:.2f} s, 99 % {last:.2f} s; at most {most['VmRSS'] >> 20} MiB, "
              f"{most['Threads']} threads, {most['files']} files; {len(self.finds)} finds")  # fmt: skip
        print(*self.finds[:50], sep="\n")

    def state(self) -> dict[str, int]:
        """Return memory, threads and open files of the service."""
        with contextlib.suppress(OSError):
            place = Path("/proc") / str(self.process.pid)
            lines = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
            files = len(list((place / "fd").iterdir()))
            return {"VmRSS": int(lines["VmRSS"].split()[0]) << 10, "Threads": int(lines["Threads"]), "files": files}
        return {}

    def _repeat(self, kind: Callable[[random.Random], None], number: int) -> None:
        dice = random.Random(f"{self.seed} {number}")
        while not self.ended.is_set() and self.process.poll() is None:
            try:
                kind(dice)
            except (OSError, http.client.HTTPException):  # cut off, which is how most of these end
                self.done[f"{kind.__name__}, cut off"] += 1
            except Exception as error:
                self.finds.append(f"{kind.__name__}: {type(error).__name__} {error}")
            self.done[kind.__name__] += 1


def _picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return cv2.imencode(".png", cv2.resize(pixels, (_SIZE, _SIZE)))[1].tobytes()


def _png(width: int, height: int) -> bytes:
    """Return a valid PNG of one colour, which is small."""
    packer = zlib.compressobj(1)
    return png_of(width, height, b"".join([*(packer.compress(bytes(1 + 3 * width)) for _ in range(height)), packer.flush()]))


def main() -> int:
    """Attack; return 1 if there is a find."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("network", nargs="*", help="words for `face serve`, behind -- (default: a small network, not trained)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    save_file(build_backbone("r18", 128, width=0.25).state_dict(), folder / "r18.safetensors")
    small = ["--backbone", "r18", "--embedding-size", "128", "--width", "0.25", "--device", "cpu", "--threads", "1"]
    attack = Attack(folder, options.network or [str(folder / "r18.safetensors"), *small], options.seed)
    attack.run(60 * options.minutes)
    shutil.rmtree(folder)
    return int(bool(attack.finds))


if __name__ == "__main__":
    raise SystemExit(main())
