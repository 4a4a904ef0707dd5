"""A small S3 server over a folder: each request waits, and what is sent is counted.

The tests' server (moto) reads an object whole to send a range of it, and so takes the CPU that is to be measured.

    with slow_bucket(folder, latency_s=0.02) as endpoint:  # AWS_ENDPOINT_URL
        …
        sent(endpoint)  # bytes by path since the last call
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_COUNTS = "/counts-of-this-server"


@contextlib.contextmanager
def slow_bucket(folder: Path, latency_s: float) -> Iterator[str]:
    """Serve the folders of a folder as buckets, in a process of its own; yields the endpoint."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(latency_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def sent(endpoint: str) -> dict[str, int]:
    """Return the bytes of content that were sent since the last call, and `requests`, how many came."""
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc)
    connection.request("GET", _COUNTS)
    counts: dict[str, int] = json.loads(connection.getresponse().read())
    connection.close()
    return counts


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.latency_s = latency_s
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        if self.path == _COUNTS:
            with self.server.lock:
                content = json.dumps(self.server.counts).encode()
                self.server.counts.clear()
            self._answer(200, {}, content)
            return
        self._wait()
        url = urlsplit(self.path)
        options = parse_qs(url.query, keep_blank_values=True)
        if "list-type" in options:
            self._answer(
                200,
                {"Content-Type": "application/xml"},
                self._listing(url.path, options),
            )
            return
        self._object(url.path, with_content=True)

    def do_HEAD(self) -> None:
        self._wait()
        self._object(urlsplit(self.path).path, with_content=False)

    def do_PUT(self) -> None:
        self._wait()
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            content = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        else:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "x-amz-decoded-content-length" in self.headers:
            # chunks with their sizes before them
            decoded = b""
            rest = content
            while rest:
                head, _, rest = rest.partition(b"\r\n")
                size = int(head.split(b";")[0], 16)
                if not size:
                    break
                decoded, rest = decoded + rest[:size], rest[size + 2 :]
            content = decoded
        path = self._place(urlsplit(self.path).path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._answer(200, {"ETag": '"x"'}, b"")

    def _wait(self) -> None:
        with self.server.lock:
            self.server.counts["requests"] += 1
        time.sleep(self.server.latency_s)

    def _place(self, path: str) -> Path:
        return self.server.folder / unquote(path).lstrip("/")

    def _object(self, path: str, with_content: bool) -> None:
        place = self._place(path)
        if not place.is_file():
            self._answer(
                404,
                {"Content-Type": "application/xml"},
                b"<Error><Code>NoSuchKey</Code></Error>",
            )
            return
        size = place.stat().st_size
        first = 0
        last = size - 1
        status = 200
        headers = {
            "ETag": f'"{place.stat().st_mtime_ns}"',
            "Last-Modified": "Fri, 27 Nov 2026 00:00:00 GMT",
        }
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last, status = int(match[1]), min(last, int(match[2] or last)), 206
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        num_bytes = last - first + 1
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(num_bytes)}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_content and num_bytes:
            with self.server.lock:
                self.server.counts[path] += num_bytes
            self.wfile.flush()
            with place.open("rb") as file:
                offset = first
                while offset <= last:
                    offset += os.sendfile(
                        self.connection.fileno(),
                        file.fileno(),
                        offset,
                        last + 1 - offset,
                    )

    def _listing(self, bucket: str, options: dict[str, list[str]]) -> bytes:
        root = self._place(bucket)
        prefix = options.get("prefix", [""])[0]
        delimiter = options.get("delimiter", [""])[0]
        keys = list[str]()
        folders = set[str]()
        for path in sorted(root.rglob("*")):
            key = str(path.relative_to(root))
            if path.is_file() and key.startswith(prefix):
                rest = key[len(prefix) :]
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                else:
                    keys.append(key)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{(root / key).stat().st_size}</Size>"
            "<LastModified>2026-11-27T00:00:00.000Z</LastModified></Contents>"
            for key in keys
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(folders)
        )
        count = len(keys) + len(folders)
        return (
            f"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>{count}</KeyCount>"
            f"{contents}{common}</ListBucketResult>"
        ).encode()

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    made = _Server(Path(sys.argv[1]), float(sys.argv[2]))
    print(made.server_port, flush=True)
    made.serve_forever()
