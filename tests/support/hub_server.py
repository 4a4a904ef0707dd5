"""A Hugging Face Hub on this machine with one data set, `me/photos`, whose files a token opens."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_this_test"
_API = "/api/datasets/me/photos"
_FILES = "/datasets/me/photos/resolve/main/"


@contextlib.contextmanager
def hub_server(files: Mapping[str, bytes]) -> Iterator[str]:
    """Context manager: the address of a hub with files, by their paths."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                self._send(401, b"{}")
            elif path.startswith(f"{_API}/tree/main"):
                folder = path.removeprefix(f"{_API}/tree/main").strip("/")
                self._send(200, json.dumps(_listing(files, folder)).encode())
            elif path.startswith(_API):
                self._send(200, b'{"id": "me/photos", "sha": "1"}')
            elif content := files.get(path.removeprefix(_FILES)):
                first, _, last = self.headers["Range"][len("bytes=") :].partition("-")
                self._send(206, content[int(first) : int(last) + 1])
            else:
                self._send(404, b"{}")

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _listing(files: Mapping[str, bytes], folder: str) -> list[dict[str, Any]]:
    """What is directly in a folder, as the hub's `tree` lists it."""
    found = dict[str, dict[str, Any]]()
    prefix = f"{folder}/" if folder else ""
    for path, content in files.items():
        if path.startswith(prefix):
            name, mark, _ = path.removeprefix(prefix).partition("/")
            entry = {"path": prefix + name, "oid": "1", "size": 0, "type": "directory"}
            if not mark:
                entry |= {"size": len(content), "type": "file"}
            found[name] = entry
    return [*found.values()]
