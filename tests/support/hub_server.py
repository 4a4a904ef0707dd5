"""A server on this machine that answers as the Hugging Face Hub does to a client that reads data sets.

GET  /api/datasets/OWNER/NAME/revision/REVISION          whether it is there
GET  /api/datasets/OWNER/NAME/tree/REVISION/FOLDER       what is in a folder
POST /api/datasets/OWNER/NAME/paths-info/REVISION        what some paths are
GET  /datasets/OWNER/NAME/resolve/REVISION/PATH          a file, or a range of it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class HubServer(ThreadingHTTPServer):
    """
    Attributes:
        files: revision → path → content, of the data set `owner/name`.
        token: what a request must have; empty = nothing.
        sent: of each range that went out, the path, the first byte and the bytes.
        failing: requests that are answered with 503 first.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.token, self.failing = files, "", 0
        self.sent: list[tuple[str, int, int]] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def hub_server(files: dict[str, dict[str, bytes]]) -> Iterator[HubServer]:
    server = HubServer(files)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        self._body()
        path = unquote(urlsplit(self.path).path)
        if self._is_refused(path):
            return
        if match := re.fullmatch(r"/datasets/owner/name/resolve/([^/]+)/(.+)", path):
            self._send_file(*match.groups())
        elif match := re.fullmatch(r"/api/datasets/owner/name/tree/([^/]+)/?(.*)", path):
            self._send_tree(*match.groups())
        else:
            self._json({"id": "owner/name", "sha": "0" * 40, "siblings": [], "tags": [], "private": False})

    def do_POST(self) -> None:
        body = self._body().decode()
        path = unquote(urlsplit(self.path).path)
        if not self._is_refused(path):
            wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            files = self.server.files[path.rpartition("/")[2]]
            self._json([_entry(name, files[name]) for name in wanted if name in files])

    def _is_refused(self, path: str) -> bool:
        server = self.server
        if server.failing:
            server.failing -= 1
            self._json({"error": "busy"}, 503)
            return True
        if server.token and self.headers.get("authorization") != f"Bearer {server.token}":
            self._json({"error": "a token is needed"}, 401)
            return True
        match = re.search(r"/datasets/owner/name(/(?:revision|tree|paths-info|resolve)/([^/]+))?", path)
        known = match is not None and (match[2] or "main") in server.files
        if not known:
            self._json(
                {"error": "not found"}, 404, {"X-Error-Code": "RevisionNotFound" if match else "RepoNotFound"}
            )
        return not known

    def _send_tree(self, revision: str, folder: str) -> None:
        files = self.server.files[revision]
        prefix = f"{folder}/" if folder else ""
        below = {name: content for name, content in files.items() if name.startswith(prefix)}
        if not below:
            self._json({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        folders = {prefix + name[len(prefix) :].split("/")[0] for name in below if "/" in name[len(prefix) :]}
        entries = [_entry(name, content) for name, content in below.items() if "/" not in name[len(prefix) :]]
        self._json(entries + [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders])

    def _send_file(self, revision: str, name: str) -> None:
        content = self.server.files[revision].get(name)
        if content is None:
            self._json({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        first, last = (int(wanted[1]), int(wanted[2])) if wanted else (0, len(content) - 1)
        part = content[first : last + 1]
        self.server.sent.append((name, first, len(part)))
        self._send(part, 206 if wanted else 200, {"Content-Range": f"bytes {first}-{last}/{len(content)}"})

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def log_message(self, *args: object) -> None:
        pass


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
