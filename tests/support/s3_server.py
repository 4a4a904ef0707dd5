"""A real S3 server on this machine, and a proxy that stands before it and breaks what passes.

    client → FaultyProxy (threads of the test's process) → moto's server (a process of its own)

A request is known by its method, address and range. Whether its n-th attempt is broken, and how, is a function of
the seed and of nothing else, so that a run of the tests meets the faults of the last one.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"""

# A client gives up some time: no request is broken more often than this in a row.
MAX_IN_A_ROW = 2


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3 server in a process of its own, empty; its endpoint, as AWS_ENDPOINT_URL has it."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def environment(endpoint: str) -> dict[str, str]:
    """What a process needs in its environment to use the server at an endpoint, and nothing else."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def make_bucket(endpoint: str, name: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=60)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


def first(
    num: int, status: int = 503, code: str = "SlowDown", after: int = 0
) -> Callable[[str], tuple[int, str] | None]:
    """An outage of so many requests, which begins after some others."""
    numbers = iter(range(after + num))
    return lambda authorization: (status, code) if next(numbers, -1) >= after else None


class FaultyProxy:
    """Passes HTTP requests on, and breaks a share of them. A context manager.

    Attributes:
        endpoint: its address.
        faults: kind → how many it has made.
        requests: method → how many came.
        sent: object's path → bytes of its content that went to clients.
        outage: None, or called with the Authorization of each request, one at a time: how it is refused, as status
            and code of S3; None = it is not.

    Args:
        upstream: endpoint of the server.
        seed: of the faults.
        rates: kind → share of requests: "throttle" (503 SlowDown), "drop" (no answer), "cut" (the answer ends
            within its body), "slow" (the body takes `slow_s` longer).
        slow_s: seconds.
        spared: ending of the paths whose requests are never broken; "" = none is spared.
    """

    def __init__(
        self,
        upstream: str,
        seed: int = 0,
        rates: Mapping[str, float] | None = None,
        slow_s: float = 0.05,
        spared: str = "",
    ) -> None:
        self.upstream, self.seed, self.rates, self.slow_s = (
            upstream,
            seed,
            dict(rates or {}),
            slow_s,
        )
        self.spared = spared
        self.faults: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._attempts: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self.outage: Callable[[str], tuple[int, str] | None] | None = None
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.proxy = self  # type: ignore[attr-defined]
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyProxy:
        threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        ).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fault_of(self, request: str) -> str:
        """How this attempt of a request is to be broken; "" = not."""
        with self.lock:
            self._attempts[request] += 1
            digest = hashlib.blake2b(
                f"{self.seed} {self._attempts[request]} {request}".encode()
            ).digest()
            chance = int.from_bytes(digest[:8], "little") / 2**64
            for kind, rate in self.rates.items():
                if chance < rate and self._in_a_row[request] < MAX_IN_A_ROW:
                    self._in_a_row[request] += 1
                    return kind
                chance -= rate
            self._in_a_row[request] = 0
            return ""

    def count(self, fault: str) -> None:
        with self.lock:
            self.faults[fault] += 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # 40 ms for each answer otherwise

    def _pass_on(self) -> None:
        proxy: FaultyProxy = self.server.proxy  # type: ignore[attr-defined]
        body = self._body()
        known_by = re.sub("uploadId=[^&]*", "", self.path)  # a random number
        path, _, _ = self.path.partition("?")
        is_spared = bool(proxy.spared) and path.endswith(proxy.spared)
        fault = refused = None
        if not is_spared:
            fault = proxy.fault_of(
                f"{self.command} {known_by} {self.headers.get('Range', '')}"
            )
        with proxy.lock:
            proxy.requests[self.command] += 1
            if proxy.outage and not is_spared:
                refused = proxy.outage(self.headers.get("Authorization", ""))
        if refused:
            proxy.count(refused[1])
            error = f"<?xml version='1.0'?><Error><Code>{refused[1]}</Code><Message>no</Message></Error>"
            content = b"" if self.command == "HEAD" else error.encode()
            self._answer(refused[0], {"Content-Type": "application/xml"}, content)
            return
        if fault == "throttle":
            proxy.count(fault)
            self._answer(
                503,
                {"Content-Type": "application/xml"},
                b"" if self.command == "HEAD" else SLOW_DOWN,
            )
            return
        if fault == "drop":
            proxy.count(fault)
            self.close_connection = True
            return
        upstream = http.client.HTTPConnection(
            urlsplit(proxy.upstream).netloc, timeout=60
        )
        headers = {
            k: v
            for k, v in self.headers.items()
            if k.lower() not in ("transfer-encoding", "connection")
        }
        headers["Content-Length"] = str(len(body))
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if fault in ("cut", "slow") and len(content) < 2:
            fault = ""
        if fault:
            proxy.count(fault)
        if fault == "slow":
            time.sleep(proxy.slow_s)
        self._answer(
            answer.status, dict(answer.getheaders()), content, cut=fault == "cut"
        )

    def _answer(
        self, status: int, headers: dict[str, str], content: bytes, cut: bool = False
    ) -> None:
        proxy: FaultyProxy = self.server.proxy  # type: ignore[attr-defined]
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in (
                "transfer-encoding",
                "connection",
                "content-length",
                "date",
                "server",
            ):
                self.send_header(name, value)
        num_bytes = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", num_bytes or str(len(content)))
        self.end_headers()
        if cut:
            content = content[: len(content) // 2]
            self.close_connection = True
        if self.command == "GET" and status in (200, 206):
            with proxy.lock:
                proxy.sent[urlsplit(self.path).path] += len(content)
        self.wfile.write(content)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def log_message(self, *args: object) -> None:
        pass

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815


def _serve() -> None:
    """The server's process: its port on standard output; it ends with its parent."""
    # What it is told of credentials and endpoints is meant for clients.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    _serve()
