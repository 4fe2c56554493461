"""The page and its REST service over HTTP, for this machine only and for requests of the page itself (Starlette, uvicorn).

Three kinds of strangers are kept out. Other machines: it listens on 127.0.0.1 alone. Web sites that the user has open, which
could send requests here: the Host header must name this address, which a rebound DNS name does not, and the browser's
statement where a request comes from (Origin, Sec-Fetch-Site) must be this page. Broken or hostile programs of this machine: no
path of a request touches the file system, a body is bounded and not read before its length is known, a request has a deadline,
and the number of connections and of waiting pictures is bounded.

    GET  /api/info            network, thresholds, histogram, gallery
    POST /api/verify          two pictures behind one another, their lengths in the header Picture-Sizes: the cosine
    POST /api/search          one picture: the people of the gallery who are most like it
    GET  /gallery/NUMBER      a face of the gallery, as PNG

Answers are JSON; an error has `error`, a sentence, and `picture`, the number of the picture from 0, or null. Nothing is written
to the disk, and no request is logged.
"""

import asyncio
import errno
import re
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from utils.text import one_line

from .answers import Answers, UploadError

ADDRESS = "127.0.0.1"
MAX_PICTURE = 24 << 20  # bytes of an upload; photographs of phones have up to 20 million
PAGE = Path(__file__).with_name("page.html")
MAX_CONNECTIONS = 32
MAX_WAITING = 6  # requests whose pictures are in memory; one of them is computed
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


class RefusedError(Exception):
    """A request that is answered with an error, in words for the user of the page."""

    def __init__(self, status: int, message: str, picture: int | None = None) -> None:
        super().__init__(message)
        self.status, self.picture = status, picture


class PageServer:
    """Serves the page until it is interrupted.

    Args:
        port: 0 = any that is free; `port` has the real one.

    Raises:
        ValueError: the port is in use, or may not be used.
    """

    def __init__(self, port: int, answers: Answers) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((ADDRESS, port))
            self.socket.listen(64)  # who connects before the loop runs waits for it
        except OSError as error:
            self.socket.close()
            known = {errno.EADDRINUSE: "is in use by another program", errno.EACCES: "is reserved for the system"}
            why = known.get(error.errno or 0, f"cannot be opened ({error.strerror})")
            raise ValueError(f"--port: {port} {why}; choose another, or 0 for any that is free") from None
        self.port = int(self.socket.getsockname()[1])
        self.routes = _Routes(answers)
        handlers: dict[Any, Any] = {404: _nothing_here, 405: _nothing_here, RefusedError: _refused, Exception: _failed}
        app = Starlette(routes=self.routes.all(), exception_handlers=handlers)
        app.router.redirect_slashes = False
        settings: dict[str, Any] = {"log_level": "critical", "access_log": False, "server_header": False, "ws": "none"}
        config = uvicorn.Config(
            _Guard(app, self.port), http=_Connection, timeout_graceful_shutdown=10, backlog=64, lifespan="off", **settings
        )
        self.server = uvicorn.Server(config)

    def serve(self) -> None:
        """Answer requests until Ctrl-C, or until `server.should_exit`; what is being computed then is waited for.

        Raises:
            KeyboardInterrupt: at Ctrl-C, when everything has ended.
        """
        self.server.run(sockets=[self.socket])


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

    def _end_after(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class _Guard:
    """Middleware that refuses requests which another web site makes a browser send, and what no page sends.

    Every answer gets the headers that forbid frames, caches and guesses, and has a deadline.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app, self.port = app, port
        ends = (f":{port}", "") if port == 80 else (f":{port}",)
        self.hosts = {f"{name}{end}" for name in ("127.0.0.1", "localhost") for end in ends}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await asyncio.wait_for(send(message), _SECONDS)

        request = Request(scope, receive)
        try:
            self._check(request)
            await self.app(scope, receive, sent)
        except RefusedError as error:
            await _refused(request, error)(scope, receive, sent)
        except Exception:  # which _failed has answered; or the client is gone or slow, and uvicorn closes the connection
            return

    def _check(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or hosts[0].strip().lower() not in self.hosts:
            raise RefusedError(403, f"open the page as http://{ADDRESS}:{self.port}/")
        if any(origin.strip().lower() not in self.origins for origin in request.headers.getlist("origin")):
            raise RefusedError(403, "another web site may not send requests here")
        site, raw = request.headers.get("sec-fetch-site", "none"), request.scope["raw_path"]
        if site not in ("none", "same-origin") and (request.method != "GET" or raw != b"/"):  # a link to the page is fine
            raise RefusedError(403, "another web site may not send requests here")
        if request.method not in ("GET", "POST"):
            raise RefusedError(501, "this is not a request of the page")
        if request.scope["query_string"] or b"%" in raw:
            raise RefusedError(404, "there is nothing here")


class _Routes:
    """The answers as endpoints. Pictures are computed one request after the other, in a thread."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.waiting = 0
        self.computing = asyncio.Lock()

    def all(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/", self._page),
            Route("/api/info", self._info),
            Route("/gallery/{number}", self._picture),
            Route("/api/verify", self._post(2), methods=["POST"]),
            Route("/api/search", self._post(1), methods=["POST"]),
        ]

    async def _page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data: blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        text = PAGE.read_text(encoding="utf-8").replace(_NONCE, nonce)
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    async def _info(self, request: Request) -> Response:
        return JSONResponse({**await run_in_threadpool(self.answers.about), "max_bytes": MAX_PICTURE})

    async def _picture(self, request: Request) -> Response:
        number = request.path_params["number"]
        found = re.fullmatch("[0-9]{1,15}", number)
        picture = await run_in_threadpool(self.answers.gallery_picture, int(number)) if found else None
        if picture is None:
            raise RefusedError(404, "there is nothing here")
        return Response(picture, media_type="image/png")

    def _post(self, count: int) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            sizes = _sizes(request, count)
            if self.waiting >= MAX_WAITING:
                raise RefusedError(503, "too many pictures are waiting; try again in a moment")
            self.waiting += 1
            try:
                body = await asyncio.wait_for(_body(request, sum(sizes)), _SECONDS)
                pictures = [body[sum(sizes[:place]) :][:size] for place, size in enumerate(sizes)]
                work: Any = self.answers.verify if count == 2 else self.answers.search
                async with self.computing:
                    return JSONResponse(await run_in_threadpool(work, *pictures))
            except UploadError as error:
                raise RefusedError(422, str(error), error.picture) from None
            except asyncio.TimeoutError:
                raise RefusedError(408, "the pictures took too long to arrive") from None
            finally:
                self.waiting -= 1

        return answer


async def _body(request: Request, size: int) -> bytes:
    """Return the body of a request, which has declared this size."""
    body = bytearray()
    async for part in request.stream():
        body += part
    if len(body) != size:
        raise RefusedError(400, "the request ended before its last picture")
    return bytes(body)


def _sizes(request: Request, count: int) -> list[int]:
    """Return the lengths of the pictures in the body, before it is read."""
    headers = request.headers
    lengths, sizes = headers.getlist("content-length"), headers.getlist("picture-sizes")
    if "transfer-encoding" in headers or len(lengths) != 1 or not re.fullmatch("[0-9]{1,12}", lengths[0].strip()):
        raise RefusedError(411, "a request must have one Content-Length")
    if headers.get("content-type", "").strip().lower() != "application/octet-stream":
        raise RefusedError(415, "pictures must be sent as application/octet-stream")
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
    headers = {"Retry-After": "1"} if status == 503 else {}
    return JSONResponse({"error": message, "picture": picture}, status, headers)


def _nothing_here(request: Request, error: Exception) -> Response:
    return _error(404, "there is nothing here")


def _refused(request: Request, error: Any) -> Response:
    return _error(error.status, str(error), error.picture)


def _failed(request: Request, error: Exception) -> Response:
    if not isinstance(error, (ClientDisconnect, asyncio.TimeoutError, OSError)):
        print(f"warning: a request failed: {type(error).__name__}: {one_line(error)}", file=sys.stderr, flush=True)
    return _error(500, "this failed; the terminal of the program says why")
