"""The service over HTTP: a page and a REST interface (Starlette, uvicorn); api.py lists the requests.

Three kinds of strangers are kept out. Other machines: it listens on 127.0.0.1, or elsewhere for those who have a key. Web sites
that the user has open, which could send requests here: the Host header must name this address, which a rebound DNS name does
not, and the browser's statement where a request comes from (Origin, Sec-Fetch-Site) must be this page. Broken or hostile
programs: no path of a request touches the file system, a body is bounded and not read before its length and its key are known,
a request has a deadline, and the number of connections and of waiting pictures is bounded.

Answers are JSON; an error has `error`, a sentence, and `picture`, the number of the picture from 0, or null. No request is
logged, and nothing but the gallery is written to the disk.
"""

import asyncio
import errno
import itertools
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import h11
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from utils.cli import warn
from utils.text import one_line

from .access import LOOPBACK, Access, Origins
from .answers import NOTHING, Answers, RefusedError
from .api import CALLS, Call, manual, openapi

MAX_PICTURE = 24 << 20  # bytes of an upload; photographs of phones have up to 20 million
PAGE = Path(__file__).with_name("page.html")
MAX_CONNECTIONS = 64
MAX_WAITING = 16  # requests whose pictures are in memory
_SECONDS = 30.0  # to send a request's head, its body, and to take its answer
_DRAIN_SECONDS = 2.0  # in which a body that was refused is thrown away: the browser would see a broken connection instead
_NONCE = "{{nonce}}"  # in the page, where the policy's nonce goes
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class PageServer:
    """Serves until it is interrupted.

    Args:
        port: 0 = any that is free; `port` has the real one.
        access: who may ask; None = everybody who can reach it, and nobody may change the gallery.
        address: where it listens.
        tls: files of the certificate and of its key, in PEM; None = plain HTTP.

    Raises:
        ValueError: the address or the port is in use, or may not be used; the certificate cannot be read.
    """

    def __init__(
        self,
        port: int,
        answers: Answers,
        access: Access | None = None,
        address: str = LOOPBACK,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.socket = _listen(address, port)
        self.port = int(self.socket.getsockname()[1])
        self.routes = _Routes(answers, access or Access())
        handlers: dict[Any, Any] = {404: _nothing_here, 405: _nothing_here, RefusedError: _refused, Exception: _failed}
        app = Starlette(routes=self.routes.all(), exception_handlers=handlers)
        app.router.redirect_slashes = False
        settings: dict[str, Any] = {"log_level": "critical", "access_log": False, "server_header": False, "ws": "none"}
        origins = Origins(address, self.port, tls is not None)
        self.page = origins.page
        guard = _Guard(app, origins, self.routes.count)
        if tls:
            settings |= {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}
        config = uvicorn.Config(
            guard, http=_Connection, timeout_graceful_shutdown=10, backlog=64, lifespan="off", proxy_headers=False, **settings
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one
            self.socket.close()
            words = f"the certificate or its key is no PEM file that can be read ({one_line(error)})"
            raise ValueError(f"--tls: {words}") from None
        self.server = uvicorn.Server(config)

    def serve(self) -> None:
        """Answer requests until Ctrl-C, or until `server.should_exit`; what is being computed then is waited for.

        Raises:
            KeyboardInterrupt: at Ctrl-C, when everything has ended.
        """
        self.server.run(sockets=[self.socket])


def _listen(address: str, port: int) -> socket.socket:
    try:
        family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host: {one_line(address)} is no address of this machine ({one_line(error)})") from None
    # asyncio sends the end of an answer at once, not after the client's delayed acknowledgement, where it sees that this is TCP
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(where)
        found.listen(64)  # who connects before the loop runs waits for it
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(f"--host: {one_line(address)} is no address of this machine; 0.0.0.0 is all of them") from None
        known = {errno.EADDRINUSE: "is in use by another program", errno.EACCES: "is reserved for the system"}
        why = known.get(error.errno or 0, f"cannot be opened ({error.strerror})")
        raise ValueError(f"--port: {port} {why}; choose another, or 0 for any that is free") from None
    return found


class _Connection(H11Protocol):
    """A connection of uvicorn, with a deadline for the head of a request; body and answer have their own."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._end_after(_SECONDS)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_after(None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Answer what has come in; the deadline ends when the head of a request is complete."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._end_after(None)

    def on_response_complete(self) -> None:
        """Give the next request its time, or a body that nobody reads a short one."""
        self._end_after(_DRAIN_SECONDS if self.conn.their_state is h11.SEND_BODY else _SECONDS)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, such as a request with two Host headers, as other errors are."""
        answer = _error(400, msg)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _end_after(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class _Guard:
    """Middleware that refuses requests which another web site makes a browser send, and what no client sends.

    Every answer gets the headers that forbid frames, caches and guesses, and has a deadline.
    """

    def __init__(self, app: ASGIApp, origins: Origins, count: Callable[[Scope, int, float], None]) -> None:
        self.app, self.origins, self.count = app, origins, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.perf_counter()

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
                self.count(scope, message["status"], time.perf_counter() - begun)
            await asyncio.wait_for(send(message), _SECONDS)

        request = Request(scope, receive)
        try:
            self.origins.check(request)
            await self.app(scope, receive, sent)
        except RefusedError as error:
            await _refused(request, error)(scope, receive, sent)
        except Exception:  # which _failed has answered; or the client is gone or slow, and uvicorn closes the connection
            return


class _Routes:
    """The calls of api.CALLS as endpoints. Answers are computed in threads, as many at once as may wait."""

    def __init__(self, answers: Answers, access: Access) -> None:
        self.access = access
        self.waiting = 0
        registry = CollectorRegistry()
        self._requests = Counter("face_requests", "Requests that were answered", ["call", "status"], registry=registry)
        self._seconds = Histogram(
            "face_request_seconds", "From the head of a request to its answer", ["call"], registry=registry
        )
        batches = Histogram(
            "face_batch_crops", "Faces in one call of the network", buckets=(1, 2, 4, 8, 16, 64, 256), registry=registry
        )
        Gauge("face_waiting", "Requests whose pictures are in memory", registry=registry).set_function(lambda: self.waiting)
        answers.batcher.observe = batches.observe
        self._works: dict[str, Callable[..., Any]] = {
            "page": lambda: _html(PAGE.read_text(encoding="utf-8")),
            "manual": lambda: _html(manual()),
            "openapi": openapi,
            "health": lambda: {"status": "ok"},
            "metrics": lambda: Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST),
            "about": lambda: {**answers.about(), "max_bytes": MAX_PICTURE, "may_change": access.may_change},
            "gallery_picture": lambda number: Response(answers.gallery_picture(number), media_type="image/png"),
            "verify": answers.verify,
            "search": answers.search,
            "embed": answers.embed,
            "people": answers.people,
            "enrol": answers.enrol,
            "forget": lambda person: answers.forget([person], []),
            "forget_image": lambda number: answers.forget([], [number]),
        }

    def all(self) -> list[Route]:
        """Return the routes."""
        return [Route(call.path, self._endpoint(call), methods=[call.method], name=call.name) for call in CALLS]

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """Count an answer for the metrics."""
        name = getattr(scope.get("endpoint"), "__name__", "nothing")
        self._requests.labels(name, str(status)).inc()
        self._seconds.labels(name).observe(seconds)

    def _endpoint(self, call: Call) -> Callable[[Request], Awaitable[Response]]:
        work = self._works[call.name]

        async def answer(request: Request) -> Response:
            self.access.require(request, call.role)
            words = request.path_params.values()
            if not call.pictures:
                # what anybody may ask, and the metrics, take no thread, which others may hold for a minute
                is_quick = not call.role or call.name == "metrics"
                found = work() if is_quick else await run_in_threadpool(work, *words)
                return found if isinstance(found, Response) else JSONResponse(found)
            sizes = _sizes(request, call.pictures)
            if self.waiting >= MAX_WAITING:
                raise RefusedError(503, "too many pictures are waiting; try again in a moment")
            self.waiting += 1
            try:
                pictures = await asyncio.wait_for(_pictures(request, sizes), _SECONDS)
                return JSONResponse(await run_in_threadpool(work, *words, *pictures))
            except asyncio.TimeoutError:
                raise RefusedError(408, "the pictures took too long to arrive") from None
            finally:
                self.waiting -= 1

        answer.__name__ = call.name  # for the metrics
        return answer


def _html(text: str) -> Response:
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(text.replace(_NONCE, nonce), headers={"Content-Security-Policy": policy})


async def _pictures(request: Request, sizes: Sequence[int]) -> list[bytes]:
    """Return the pictures in the body of a request, which has declared these sizes."""
    body = bytearray()
    async for part in request.stream():
        body += part
    if len(body) != sum(sizes):
        raise RefusedError(400, "the request ended before its last picture")
    ends = itertools.accumulate(sizes)
    return [bytes(memoryview(body)[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _sizes(request: Request, count: int) -> list[int]:
    """Return the lengths of the pictures in the body, before it is read."""
    headers = request.headers
    lengths, sizes = headers.getlist("content-length"), headers.getlist("picture-sizes")
    if "transfer-encoding" in headers or len(lengths) != 1 or not re.fullmatch("[0-9]{1,12}", lengths[0].strip()):
        raise RefusedError(411, "a request must have one Content-Length")
    if not re.fullmatch(r"application/octet-stream|image/[\w.+-]+", headers.get("content-type", "").strip().lower()):
        raise RefusedError(415, "pictures must be sent as application/octet-stream or image/*")
    if not sizes and count == 1:
        sizes = lengths
    found = re.fullmatch(r" *[0-9]{1,12}( *, *[0-9]{1,12})* *", sizes[0]) if len(sizes) == 1 else None
    numbers = [int(text) for text in sizes[0].split(",")] if found else []
    if int(lengths[0]) > count * MAX_PICTURE or max(numbers, default=0) > MAX_PICTURE:
        large = next((place for place, number in enumerate(numbers) if number > MAX_PICTURE), None)
        raise RefusedError(413, f"a picture may have {MAX_PICTURE >> 20} MiB at most; make it smaller", large)
    if len(numbers) != count or sum(numbers) != int(lengths[0]):
        raise RefusedError(400, f"Picture-Sizes must have the lengths of {count} picture(s), which add up to Content-Length")
    return numbers


def _error(status: int, message: str, picture: int | None = None) -> Response:
    headers = {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(status, {})
    return JSONResponse({"error": message, "picture": picture}, status, headers)


def _nothing_here(request: Request, error: Exception) -> Response:
    return _error(404, NOTHING)


def _refused(request: Request, error: Any) -> Response:
    return _error(error.status, str(error), error.picture)


def _failed(request: Request, error: Exception) -> Response:
    if not isinstance(error, (ClientDisconnect, asyncio.TimeoutError, ConnectionError)):
        warn(f"a request failed: {type(error).__name__}: {error}")
    return _error(500, "this failed; the terminal of the program says why")
