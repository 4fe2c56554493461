"""The HTTP server of the page: for this machine only, and for requests of the page itself.

Three kinds of strangers are kept out. Other machines: it listens on 127.0.0.1 alone. Web sites that the user has open, which
could send requests here: the Host header must name this address, which a rebound DNS name does not, and the browser's
statement where a request comes from (Origin, Sec-Fetch-Site) must be this page. Broken or hostile programs of this machine: no
path of a request touches the file system, a body is bounded and not read before its length is known, a request has a deadline,
and the number of connections and of waiting pictures is bounded.

A request is answered in HTTP/1.0, with one request per connection. POST has the bytes of one picture or two behind one
another, and their lengths in the header Picture-Sizes. Nothing is written to the disk, and no request is logged.
"""

import contextlib
import errno
import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Protocol

from utils.text import one_line

ADDRESS = "127.0.0.1"
MAX_PICTURE = 24 << 20  # bytes of an upload; photographs of phones have up to 20 million
_MAX_CONNECTIONS = 32
_MAX_WAITING = 6  # requests whose pictures are in memory; one of them is computed
_SECONDS = 30.0  # to receive a request, and again to take its answer
_DRAIN_SECONDS = 2.0
_NONCE = "{{nonce}}"  # in the page, where the policy's nonce goes
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)


class UploadError(Exception):
    """A picture cannot be used: what the user of the page reads, and which of the pictures it is, from 0."""

    def __init__(self, message: str, picture: int = 0) -> None:
        super().__init__(message)
        self.picture = picture


class Answers(Protocol):
    """What the page asks for. `verify` and `search` are called by one thread at a time, and raise UploadError."""

    def about(self) -> dict[str, Any]:
        """Return what the page shows before any picture: network, thresholds, histogram, gallery."""

    def verify(self, first: bytes, second: bytes) -> dict[str, Any]:
        """Return the comparison of two pictures."""

    def search(self, picture: bytes) -> dict[str, Any]:
        """Return the people of the gallery who are most like the one on a picture."""

    def gallery_picture(self, number: int) -> bytes | None:
        """Return an encoded JPEG or PNG of the gallery, None if there is none of this number."""


class Reply(NamedTuple):
    """A response."""

    status: int
    content_type: str
    body: bytes
    more: tuple[tuple[str, str], ...] = ()  # headers


class RefusedError(Exception):
    """A request that is answered with an error, in words for the user of the page."""

    def __init__(self, status: int, message: str, picture: int | None = None) -> None:
        super().__init__(message)
        self.status, self.picture = status, picture


class PageServer(ThreadingHTTPServer):
    """Serves the page until it is interrupted.

    Args:
        port: 0 = any that is free; `port` has the real one.
        page: HTML with _NONCE at its script and style.

    Raises:
        ValueError: the port is in use, or may not be used.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, port: int, page: str, answers: Answers) -> None:
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            known = {errno.EADDRINUSE: "is in use by another program", errno.EACCES: "is reserved for the system"}
            why = known.get(error.errno or 0, f"cannot be opened ({error.strerror})")
            raise ValueError(f"--port: {port} {why}; choose another, or 0 for any that is free") from None
        self.port = int(self.server_address[1])
        self.page, self.answers = page, answers
        self.waiting = threading.BoundedSemaphore(_MAX_WAITING)
        self.computing = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}
        self._guard = threading.Lock()
        names = ("127.0.0.1", "localhost")
        ends = (f":{self.port}", "") if self.port == 80 else (f":{self.port}",)
        self.hosts = {f"{name}{end}" for name in names for end in ends}
        self.origins = {f"http://{host}" for host in self.hosts}

    def set_deadline(self, connection: socket.socket, seconds: float | None) -> None:
        """Close a connection after so many seconds from now; None = not before another deadline is set."""
        with self._guard:
            self._deadlines[connection] = time.monotonic() + seconds if seconds is not None else float("inf")

    def service_actions(self) -> None:
        """End what is late; called twice a second."""
        now = time.monotonic()
        with self._guard:
            late = [connection for connection, end in self._deadlines.items() if end < now]
        for connection in late:
            with contextlib.suppress(OSError):  # its thread then reads the end of the stream
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, unless there are too many."""
        with self._guard:
            full = len(self._deadlines) >= _MAX_CONNECTIONS
        if full:
            self.shutdown_request(request)
            return
        self.set_deadline(request, _SECONDS)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._guard:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that broke, and one line of anything else."""
        error = sys.exc_info()[1]
        if not isinstance(error, (OSError, ValueError)):
            print(f"warning: a request failed: {type(error).__name__}: {one_line(error)}", file=sys.stderr, flush=True)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "face", ""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the base class refuses, such as an unknown method, as all other errors."""
        self._send(_error(int(code), "this is not a request of the page"))

    def do_GET(self) -> None:
        """Answer a request for the page, its facts, or a picture of the gallery."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answer a request with pictures."""
        self._answer(self._post)

    def _answer(self, reply_of: Any) -> None:
        try:
            self._check_origin()
            reply = reply_of()
        except RefusedError as error:
            reply = _error(error.status, str(error), error.picture)
        except ConnectionError:
            raise
        except Exception as error:
            print(f"warning: a request failed: {type(error).__name__}: {one_line(error)}", file=sys.stderr, flush=True)
            reply = _error(500, "this failed; the terminal of the program says why")
        self._send(reply)

    def _check_origin(self) -> None:
        """Refuse requests that another web site makes a browser send."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].strip().lower() not in self.server.hosts:
            raise RefusedError(403, f"open the page as http://{ADDRESS}:{self.server.port}/")
        origins = self.headers.get_all("Origin") or []
        if any(origin.strip().lower() not in self.server.origins for origin in origins):
            raise RefusedError(403, "another web site may not send requests here")
        site = self.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin") and (self.command != "GET" or self.path != "/"):  # a link to the page is fine
            raise RefusedError(403, "another web site may not send requests here")

    def _get(self) -> Reply:
        if self.path == "/":
            nonce = secrets.token_urlsafe(16)
            policy = (
                f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data: blob:; "
                "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
            page = self.server.page.replace(_NONCE, nonce).encode()
            return Reply(200, "text/html; charset=utf-8", page, (("Content-Security-Policy", policy),))
        if self.path == "/about":
            return _json(200, {**self.server.answers.about(), "max_bytes": MAX_PICTURE})
        number = re.fullmatch(r"/gallery/([0-9]{1,15})", self.path)
        picture = self.server.answers.gallery_picture(int(number[1])) if number else None
        if picture is None:
            raise RefusedError(404, "there is nothing here")
        return Reply(200, "image/png" if picture.startswith(b"\x89PNG") else "image/jpeg", picture)

    def _post(self) -> Reply:
        count = {"/verify": 2, "/search": 1}.get(self.path)
        if count is None:
            raise RefusedError(404, "there is nothing here")
        sizes = self._sizes(count)
        with self._place():
            pictures = [self._read(size) for size in sizes]
            self.server.set_deadline(self.connection, None)  # now it waits for us
            try:
                with self.server.computing:
                    answers = self.server.answers
                    return _json(200, answers.verify(*pictures) if count == 2 else answers.search(*pictures))
            except UploadError as error:
                raise RefusedError(422, str(error), error.picture) from None

    def _sizes(self, count: int) -> list[int]:
        """Return the lengths of the pictures in the body, before it is read."""
        lengths, sizes = self.headers.get_all("Content-Length") or [], self.headers.get_all("Picture-Sizes") or []
        if self.headers.get("Transfer-Encoding") or len(lengths) != 1 or not re.fullmatch("[0-9]{1,12}", lengths[0].strip()):
            raise RefusedError(411, "a request must have one Content-Length")
        if self.headers.get("Content-Type", "").strip().lower() != "application/octet-stream":
            raise RefusedError(415, "pictures must be sent as application/octet-stream")
        found = re.fullmatch(r" *[0-9]{1,12}( *, *[0-9]{1,12})* *", sizes[0]) if len(sizes) == 1 else None
        numbers = [int(text) for text in sizes[0].split(",")] if found else []
        if int(lengths[0]) > count * MAX_PICTURE or max(numbers, default=0) > MAX_PICTURE:
            large = next((place for place, number in enumerate(numbers) if number > MAX_PICTURE), None)
            raise RefusedError(413, f"a picture may have {MAX_PICTURE >> 20} MiB at most; make it smaller", large)
        if len(numbers) != count or sum(numbers) != int(lengths[0]):
            raise RefusedError(
                400, f"Picture-Sizes must have the lengths of {count} picture(s), which add up to Content-Length"
            )
        return numbers

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Take one of the places for requests whose pictures are in memory."""
        if not self.server.waiting.acquire(blocking=False):
            raise RefusedError(503, "too many pictures are waiting; try again in a moment")
        try:
            yield
        finally:
            self.server.waiting.release()

    def _read(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise RefusedError(400, "the request ended before its last picture")
        return data

    def _send(self, reply: Reply) -> None:
        """Send a response. A body that nobody read is thrown away first: the browser would see a broken connection instead."""
        self.server.set_deadline(self.connection, _SECONDS)
        self.send_response_only(reply.status)
        for name, value in (*_HEADERS, *reply.more):
            self.send_header(name, value)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)
        self.close_connection = True
        if reply.status >= 400:
            self.server.set_deadline(self.connection, _DRAIN_SECONDS)
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                while self.connection.recv(1 << 16):
                    pass


def _json(status: int, values: dict[str, Any], more: tuple[tuple[str, str], ...] = ()) -> Reply:
    return Reply(status, "application/json", json.dumps(values, allow_nan=False).encode(), more)


def _error(status: int, message: str, picture: int | None = None) -> Reply:
    more = (("Retry-After", "1"),) if status == 503 else ()
    return _json(status, {"error": message, "picture": picture}, more)
