"""The verb ``grads serve``: queries of a gradient store in a browser, over HTTP on this machine's loopback address."""

from __future__ import annotations

import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from gradwire.attribution.options import Count, Metric
from gradwire.attribution.query.query import StoreOptions
from gradwire.base.errors import BadInput
from gradwire.base.failures import reason, unexpected
from gradwire.base.flags import PORT
from gradwire.base.strict import Strict, checked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gradwire.attribution.query.searcher import Searcher

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")  # by which a browser may call the server; others may belong to a foreign page
PAGE = Path(__file__).with_name("serve.html")
LONGEST = 1 << 20  # bytes of a request
PATIENCE = 30.0  # seconds that a connection may be silent
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Options(StoreOptions):
    """Flags of ``gradwire grads serve``."""

    port: Annotated[int, PORT] = Field(8000, description="port of the page; 0: any free port")


class Query(Strict):
    """A request of the page or a program: one of a text, a chat as in a corpus file, and a sample of the store."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    sample_id: str | None = None
    metric: Metric = "cosine"
    top_k: Count = Field(10, strict=True)

    @model_validator(mode="after")
    def _check_query(self) -> Self:
        if sum(getattr(self, name) is not None for name in ("prompt", "messages", "sample_id")) != 1:
            raise ValueError("give one of prompt, messages and sample_id")
        return self

    def rows(self, searcher: Searcher) -> NDArray[np.float32]:
        """Return the query's row [1, D].

        Raises:
            BadInput: If there is no such sample, or the text has no target or is too long.
        """
        if self.sample_id is not None:
            return searcher.stored(self.sample_id)
        return searcher.of_messages(self.messages) if self.prompt is None else searcher.of_prompt(self.prompt)


def main(options: Options) -> None:
    """Load the store and its model, and answer until Ctrl-C.

    Raises:
        BadInput: If the store or the model are invalid, or the port is in use.
    """
    searcher = options.searcher()
    searcher.load()
    with server(searcher, options.port) as serving:
        print(f"{options.store} is on http://{ADDRESS}:{serving.server_port}/ until Ctrl-C", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            print()


class Server(ThreadingHTTPServer):
    """Says nothing of a client that leaves."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error that is not the client's."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def server(searcher: Searcher, port: int) -> Server:
    """Open the port; ``serve_forever`` answers.

    Raises:
        BadInput: If the port is in use.
    """
    handler = type("Bound", (Handler,), {"searcher": searcher, "lock": Lock()})
    try:
        return Server((ADDRESS, port), handler)
    except OSError as error:
        raise BadInput(f"--port {port} cannot be opened on {ADDRESS}: {error.strerror}; give another one.") from None


class Handler(BaseHTTPRequestHandler):
    """``GET /`` is the page, ``POST /query`` answers a query: both as JSON objects.

    A page of another site can neither read an answer (its requests have another ``Host`` or are not JSON) nor cause
    more than a refusal.
    """

    searcher: Searcher
    lock: Lock
    timeout = PATIENCE

    def do_GET(self) -> None:
        """Send the page."""
        if self._refused("/"):
            return
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", PAGE.read_bytes())

    def do_POST(self) -> None:
        """Answer a query."""
        if self._refused("/query"):
            return
        length = self.headers.get("Content-Length", "")
        by_program = not {"Content-Type", "Origin"} & {*self.headers}  # a page's request has an origin
        if not by_program and self.headers.get_content_type() != "application/json":
            self._complain(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a query has the header Content-Type: application/json.")
        elif not length.isdecimal() or len(length) > len(str(LONGEST)) or int(length) > LONGEST:
            self._complain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a query has at most {LONGEST} bytes.")
        else:
            self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        try:
            with self.lock:  # the model and its buffers serve one query at a time
                top = answer(self.searcher, body)
        except BadInput as error:
            self._complain(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            self._complain(HTTPStatus.INTERNAL_SERVER_ERROR, reason(error))
            if unexpected(error):
                raise
        else:
            self._json(HTTPStatus.OK, {"top": top})

    def _refused(self, path: str) -> bool:
        """Refuse other hosts and paths; return whether the request was refused."""
        if self.headers.get("Host", "").rpartition(":")[0] not in NAMES:
            self._complain(HTTPStatus.FORBIDDEN, f"this server answers to {' and '.join(NAMES)} only.")
            return True
        if self.path != path:
            self._complain(HTTPStatus.NOT_FOUND, f"there is no {self.path}.")
        return self.path != path

    def _complain(self, status: HTTPStatus, message: str) -> None:
        self.close_connection = True  # the body may be unread
        self._json(status, {"error": message})

    def _json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value, ensure_ascii=False).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: prompts belong to the user."""


def answer(searcher: Searcher, body: bytes) -> list[dict[str, Any]]:
    """Answer a query: a JSON object of a `Query`.

    Raises:
        BadInput: If the query is invalid.
    """
    try:
        asked = json.loads(body)
        json.dumps(asked, ensure_ascii=False).encode()  # no lone surrogates
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the query is not JSON in UTF-8: {error}.") from None
    query = checked(Query, asked, "invalid query")
    return searcher.nearest(query.rows(searcher), query.metric, "mean", query.top_k)
