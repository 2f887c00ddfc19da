"""A client in another language: a child that answers JSON requests, one a line."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tests.compat.adapters.adapter import Message, Outgoing
from tests.support.patience import LONGEST_S


class ForeignClientError(Exception):
    """What the client in the other language said."""


class LineClient:
    """One child process, started by the first request."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environ = dict(environ)
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            ForeignClientError: it failed, or the child is gone.
        """
        if self._child is None:
            self._child = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        request = {"command": command, "timeout_s": LONGEST_S, **arguments}
        self._child.stdin.write(orjson.dumps(request) + b"\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise ForeignClientError(f"{self._command[0]} ended: {command}")
        answer = orjson.loads(line)
        if "error" in answer:
            raise ForeignClientError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def to_json(record: Outgoing) -> dict[str, Any]:
    return {
        "partition": record.partition,
        "key": _encode(record.key),
        "value": _encode(record.value),
        "timestamp_ms": record.timestamp_ms,
        "headers": [{"key": k, "value": _encode(v)} for k, v in record.headers],
    }


def to_message(found: Mapping[str, Any]) -> Message:
    return Message(
        found["offset"],
        _decode(found["key"]),
        _decode(found["value"]),
        tuple((each["key"], _decode(each["value"])) for each in found["headers"]),
        found["timestamp_ms"],
    )


def _encode(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _decode(value: str | None) -> bytes | None:
    return None if value is None else base64.b64decode(value)
