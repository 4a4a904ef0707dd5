"""`aws` for scripts: a command that hands its words to this process, where boto3, and so moto, answers them.

It knows the AWS CLI's own rules as far as deploy/aws-account.sh uses them: options are an operation's parameters,
with values as words, as JSON, or as `Name=…,Values=…`; `--query` is JMESPath; `--output text`.
"""

from __future__ import annotations

import json
import socketserver
import threading
from pathlib import Path
from typing import Any

import boto3
import jmespath
from botocore import xform_name
from botocore.exceptions import ClientError

COMMAND = """#!/usr/bin/env bash
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\\0' "$#" "$@" >&3
IFS= read -r -u 3 code
if ((code)); then cat <&3 >&2; else cat <&3; fi
exit "$code"
"""


class AwsCli:
    """A context: within, `aws` is in `folder`, for a PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> AwsCli:
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        command = self.folder / "aws"
        command.write_text(COMMAND.format(port=self._server.server_address[1]))
        command.chmod(0o755)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        words = [self._word() for _ in range(int(self._word()))]
        try:
            code, text = 0, _answer(words)
        except ClientError as error:
            code, text = 254, f"\n{error}\n"
        self.wfile.write(f"{code}\n{text}".encode())

    def _word(self) -> str:
        word = b""
        while (byte := self.rfile.read(1)) not in (b"\0", b""):
            word += byte
        return word.decode()


def _answer(words: list[str]) -> str:
    client = boto3.client(words[0])  # type: ignore[call-overload]
    operation = client.meta.method_to_api_mapping[words[1].replace("-", "_")]
    options: dict[str, list[str]] = {}
    for word in words[2:]:
        if word.startswith("--"):
            values = options[word[2:]] = []
        else:
            values.append(word)
    (query,), (output,) = options.pop("query", [""]), options.pop("output", ["json"])
    shape = client.meta.service_model.operation_model(operation).input_shape
    names = {xform_name(name, "-"): name for name in shape.members}
    given = {
        names[name]: _value(shape.members[names[name]], values)
        for name, values in options.items()
    }
    found = getattr(client, words[1].replace("-", "_"))(**given)
    found = jmespath.search(query, found) if query else found
    if output == "text":
        return "\t".join(map(str, found if isinstance(found, list) else [found])) + "\n"
    return json.dumps(found, default=str)


def _value(shape: Any, values: list[str]) -> Any:
    if values[0].startswith("["):
        return json.loads(values[0])
    if shape.type_name == "list":
        return [
            _short(value) if shape.member.type_name == "structure" else value
            for value in values
        ]
    (value,) = values
    return value


def _short(text: str) -> dict[str, Any]:
    """`Name=a,Values=b,c`."""
    name, _, values = text.removeprefix("Name=").partition(",Values=")
    return {"Name": name, "Values": values.split(",")}
