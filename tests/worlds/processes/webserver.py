"""A web server on loopback that serves a folder, understands ranges, and misbehaves as a test tells it to."""

from __future__ import annotations

import contextlib
import re
import ssl
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class WebServer:
    """`faults[path]` holds what the next requests for it get instead of an answer; `asked` what was asked for.

    Faults: a number (that status), `cut N` (N bytes of the body, then the line breaks), `short`, `long` (another
    length than promised by the index), `flip` (a wrong byte), `flip N` (byte N is wrong), `all` (a range is ignored),
    `to URL` (a redirect that says that a terabyte comes with it), `hold N` (N bytes of the body, and the rest once
    `released` is set).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: dict[str, deque[str]] = defaultdict(deque)
        self.asked: list[tuple[str, str]] = []  # path, Range
        self.address = ""
        self.released = threading.Event()

    def url(self, path: str = "") -> str:
        return f"{self.address}/{path}"


@contextlib.contextmanager
def serving(folder: Path, context: ssl.SSLContext | None = None) -> Iterator[WebServer]:
    """A server for `folder` on a free port of loopback; with `context` over https."""
    web = WebServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, web)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up, as one must that does not believe us, is no news."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # server_close waits for them
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    web.address = f"http{'s' if context else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(handler: BaseHTTPRequestHandler, web: WebServer) -> None:
    path = unquote(handler.path.lstrip("/"))
    wanted = handler.headers.get("Range", "")
    web.asked.append((path, wanted))
    fault = web.faults[path].popleft() if web.faults[path] else ""
    file = web.folder / path
    if fault.startswith("to "):
        return _head(handler, 302, {"Location": fault[3:], "Content-Length": str(1 << 40)})
    if fault.isdigit() or not file.is_file():
        return _head(handler, int(fault or 404), {"Content-Length": "0", "Retry-After": "7"})
    body = file.read_bytes()
    if fault.startswith("flip"):
        wrong = int(fault[5:] or 0)
        body = body[:wrong] + bytes([body[wrong] ^ 1]) + body[wrong + 1 :]
    elif fault in ("short", "long"):
        body = body[:-1] if fault == "short" else body + b"x"
    headers, status = {}, 200
    if (found := re.fullmatch(r"bytes=(\d+)-", wanted)) and fault != "all":
        start = int(found[1])
        if start >= len(body):
            return _head(handler, 416, {"Content-Length": "0"})
        headers["Content-Range"], status = f"bytes {start}-{len(body) - 1}/{len(body)}", 206
        body = body[start:]
    _head(handler, status, headers | {"Content-Length": str(len(body))})
    if fault.startswith("hold "):
        handler.wfile.write(body[: int(fault[5:])])
        handler.wfile.flush()
        web.released.wait(30.0)
        body = body[int(fault[5:]) :]
    handler.wfile.write(body[: int(fault[4:])] if fault.startswith("cut ") else body)
    handler.close_connection = True
    return None


def _head(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
