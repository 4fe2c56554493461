"""The requests of the service: one table, of which the routes, the OpenAPI description and the page of the API are made."""

import html
import re
from typing import Any, NamedTuple

VERSION = "1"
_PERSON = {"person": "name of the person"}
_IMAGE = {"number": "number of the image"}
_INFO = {"network": "string", "image_size": "integer", "embedding_size": "integer", "max_bytes": "integer", "far": "string",
         "gate": {"min_norm": "number", "max_padding": "number"}}  # fmt: skip
_PEOPLE = {"people": [{"name": "string", "cosine": "number", "image": "integer"}], "match": "string?", "face": "string"}


class Call(NamedTuple):
    """A request."""

    method: str
    path: str
    name: str  # of the function that answers it
    role: str  # of the key that it needs, of access.ROLES; "" = none
    summary: str
    answer: dict[str, Any] | str  # fields of the JSON and their types, "?" for null as well; or another answer's media type
    pictures: int = 0  # in its body, behind one another
    path_words: dict[str, str] = {}  # noqa: RUF012, never changed; what the parts of the path in braces are


CALLS = (
    Call("GET", "/", "page", "", "The page.", "text/html"),
    Call("GET", "/api", "manual", "", "This list.", "text/html"),
    Call("GET", "/api/openapi.json", "openapi", "", "This list in the words of OpenAPI 3.1.", {"openapi": "string"}),
    Call("GET", "/api/health", "health", "", "Whether the service answers.", {"status": "string"}),
    Call("GET", "/metrics", "metrics", "ask", "Counts and times for Prometheus.", "text/plain"),
    Call("GET", "/api/info", "about", "ask", "Network, thresholds, histogram, how many people and images there are, and "
         "what a face must have to be enrolled.", _INFO),
    Call("POST", "/api/verify", "verify", "ask", "Whether two pictures show the same person; null without a threshold.",
         {"cosine": "number", "same": "boolean?", "faces": ["string"]}, 2),
    Call("POST", "/api/search", "search", "ask", "The people who are most like the face of a picture, best first.", _PEOPLE, 1),
    Call("POST", "/api/embed", "embed", "ask", "The unit embedding of the face of a picture, and the length before.",
         {"embedding": ["number"], "norm": "number"}, 1),
    Call("GET", "/api/people", "people", "ask", "The people and their numbers of images.", {"people": {"": "integer"}}),
    Call("POST", "/api/people/{person:path}", "enrol", "change",
         "Enrol a picture that passes the gate of /api/info, else 422 says why; null if the person has it already.",
         {"person": "string", "image": "integer?"}, 1, _PERSON),
    Call("DELETE", "/api/people/{person:path}", "forget", "change", "Erase a person with all images.",
         {"removed": "integer"}, 0, _PERSON),
    Call("DELETE", "/api/images/{number}", "forget_image", "change", "Erase an image.", {"removed": "integer"}, 0, _IMAGE),
    Call("GET", "/gallery/{number}", "gallery_picture", "ask", "The enrolled face of an image.", "image/png", 0, _IMAGE),
)  # fmt: skip


def public_path(call: Call) -> str:
    """Return the path as a reader knows it, without the kind of its parts."""
    return re.sub(r":\w+}", "}", call.path)


def openapi() -> dict[str, Any]:
    """Return the description of the service in OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for call in CALLS:
        content = {call.answer: {}} if isinstance(call.answer, str) else {"application/json": {"schema": _schema(call.answer)}}
        found: dict[str, Any] = {"operationId": call.name, "summary": call.summary}
        found["security"] = [{"key": []}] if call.role else []
        found["responses"] = {"200": {"description": "the answer", "content": content}, "default": _ERROR}
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "description": words, "schema": {"type": "string"}}
            for name, words in call.path_words.items()
        ]
        if call.pictures:
            binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
            found["requestBody"] = {"required": True, "content": binary}
        if call.pictures > 1:
            sizes = {"name": "Picture-Sizes", "in": "header", "required": True, "schema": {"type": "string"}}
            found["parameters"].append(
                {**sizes, "description": "the lengths of the pictures in the body, in bytes: 1234, 5678"}
            )
        paths.setdefault(public_path(call), {})[call.method.lower()] = found
    key = {"type": "http", "scheme": "bearer"}
    info = {"title": "Face recognition", "version": VERSION}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"securitySchemes": {"key": key}}}


def _schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type of the table."""
    if isinstance(kind, list):
        return {"type": "array", "items": _schema(kind[0])}
    if isinstance(kind, dict) and "" in kind:
        return {"type": "object", "additionalProperties": _schema(kind[""])}
    if isinstance(kind, dict):
        return {"type": "object", "properties": {name: _schema(one) for name, one in kind.items()}, "required": list(kind)}
    return {"type": [kind[:-1], "null"] if kind.endswith("?") else kind}


_ERROR = {
    "description": "a sentence that says what is wrong, and the number of the picture from 0",
    "content": {"application/json": {"schema": _schema({"error": "string", "picture": "integer?"})}},
}


def manual() -> str:
    """Return the list of requests as a page."""
    rows = []
    for call in CALLS:
        body = ("", "a picture", "two pictures, their lengths in Picture-Sizes")[call.pictures]
        answer = call.answer if isinstance(call.answer, str) else ", ".join(call.answer)
        cells = [f"{call.method} {public_path(call)}", body, answer, call.role, call.summary]
        rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    head = "".join(f"<th>{word}</th>" for word in ("request", "body", "answer", "role of the key", "what it does"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Requests of the service</title><style nonce="{{nonce}}">'
        "body{font:15px/1.5 sans-serif;margin:2em}td,th{text-align:left;padding:.3em 1em .3em 0;border-bottom:1px solid #ccc;"
        "vertical-align:top}td:first-child{font-family:monospace}</style><h1>Requests of the service</h1><table><tr>"
        f"{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table><p>Pictures are sent as application/octet-stream or "
        'image/*, behind one another. <a href="/api/openapi.json">The same in OpenAPI</a>, <a href="/">the page</a>.</html>'
    )
