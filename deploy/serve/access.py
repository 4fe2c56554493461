"""Who may ask the service what: the keys of a file, and the requests that another web site makes a browser send."""

import hashlib
import re
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes

from starlette.requests import Request

from utils.files import read_bytes, shown

from .answers import NOTHING, RefusedError

LOOPBACK = "127.0.0.1"
ROLES = ("ask", "change")  # verify, search, embed, read; and also enrol and remove
_KEY = re.compile(r"[!-~]{16,200}")
_MAX_FILE = 1 << 20  # bytes


class Access:
    """The roles of keys.

    Args:
        keys: a file with a line `ROLE KEY` for each key, and lines that begin with #. None = no request needs a key, and none
            may change anything.

    Raises:
        ValueError: other users of this machine may read the file, or a line is something else.
    """

    def __init__(self, keys: Path | None = None) -> None:
        self.roles: dict[bytes, str] | None = None if keys is None else _read_keys(keys)

    @property
    def may_change(self) -> bool:
        """Whether somebody may enrol and remove people."""
        return self.roles is not None and "change" in self.roles.values()

    def require(self, request: Request, role: str) -> None:
        """Raise RefusedError unless the request may do what needs `role`; "" is what everybody may do."""
        if not role or (self.roles is None and role == "ask"):
            return
        if self.roles is None:
            raise RefusedError(403, "nobody may change the gallery; start the program with --keys FILE")
        given = request.headers.getlist("authorization")
        word, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        # the hash is looked up, so that the time says nothing about the keys
        found = self.roles.get(hashlib.sha256(key.strip().encode()).digest()) if word.lower() == "bearer" else None
        if found is None:
            raise RefusedError(401, "a key is needed: send the header Authorization: Bearer KEY")
        if ROLES.index(found) < ROLES.index(role):
            raise RefusedError(403, f"this needs a key whose role is {role}")


def _read_keys(path: Path) -> dict[bytes, str]:
    lines = read_bytes(path, _MAX_FILE).decode("utf-8", "replace").splitlines()
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(f"--keys: other users may read {shown(path)}; chmod 600 {shown(path)}")
    roles: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] not in ROLES or not _KEY.fullmatch(words[1]):
            raise ValueError(
                f"--keys: line {number} of {shown(path)} must be `ask KEY` or `change KEY`, a key of 16 to 200 ASCII characters"
            )
        digest = hashlib.sha256(words[1].encode()).digest()
        if roles.setdefault(digest, words[0]) != words[0]:
            raise ValueError(f"--keys: line {number} of {shown(path)} gives a key another role than before; leave one of them")
    if not roles:
        raise ValueError(f"--keys: {shown(path)} has no key; write a line such as `change KEY`")
    return roles


class Origins:
    """The names under which the service may be asked, and the web sites that may send requests: its own page alone.

    Args:
        address, port, encrypted: where and how it listens. On the loopback address the Host header must name it, because a
            strange name may be rebound to it; elsewhere keys keep strangers out, and a proxy may give it any name.
    """

    def __init__(self, address: str, port: int, encrypted: bool = False) -> None:
        self.kind = "https" if encrypted else "http"
        ends = (f":{port}", "") if port == (443 if encrypted else 80) else (f":{port}",)
        self.page = f"{self.kind}://{f'[{address}]' if ':' in address else address}:{port}/"
        self.hosts = {f"{name}{end}" for name in ("127.0.0.1", "localhost") for end in ends} if address == LOOPBACK else None

    def check(self, request: Request) -> None:
        """Raise RefusedError for what no client of the service sends."""
        hosts = [host.strip().lower() for host in request.headers.getlist("host")]
        if len(hosts) != 1 or (self.hosts is not None and hosts[0] not in self.hosts):
            raise RefusedError(403, f"open the page as {self.page}")
        kinds = (self.kind,) if self.hosts else ("http", "https")  # a proxy may have taken the encryption off
        own = {f"{kind}://{host}" for kind in kinds for host in self.hosts or hosts}
        site, raw = request.headers.get("sec-fetch-site", "none"), request.scope["raw_path"]
        is_link = request.method == "GET" and raw == b"/"  # from another site to the page, which is fine
        foreign = site not in ("none", "same-origin") and not is_link
        if foreign or any(origin.strip().lower() not in own for origin in request.headers.getlist("origin")):
            raise RefusedError(403, "another web site may not send requests here")
        if request.method not in ("GET", "POST", "DELETE"):
            raise RefusedError(501, "this is not a request of the service")
        if request.scope["query_string"] or (b"%" in raw and not raw.startswith(b"/api/people/")):
            raise RefusedError(404, NOTHING)
        try:
            unquote_to_bytes(raw).decode()
        except UnicodeDecodeError:  # it would become the name of somebody else
            raise RefusedError(400, "the path must be UTF-8, with %XX for what is not ASCII") from None
