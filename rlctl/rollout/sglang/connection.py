"""The HTTP connection to an SGLang server: JSON in, JSON out, every wait bounded."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from rlctl.errors import RlctlError, UsageError
from rlctl.rollout.sglang.requests import Call
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import ReplicaLostError

_CONNECT_SECONDS = 10.0
_SHOWN = 300


class SglangError(RlctlError):
    """The server refused a request."""


class SglangConnection:
    """Requests to one server, each over a connection of its own; from any thread.

    Args:
        url: ``http://host:port``, or ``https``.
        key: the API key that the server asks for; empty when it asks for none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise UsageError(f"{url!r} is no address of a server", fix="http://HOST:PORT")
        self.url = url
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, call: Call, deadline: Deadline) -> Any:
        """Return the answer: parsed JSON, None when it is empty.

        Raises:
            ReplicaLostError: the server cannot be reached, or went away while it was to answer.
            SglangError: it answered with an error, or with ``success`` false.
            DeadlineError: it did not answer in time.
        """
        what = f"SGLang at {self.url}: {call.path}"
        deadline.check(what)
        connection = self._kind(self._host, self._port, timeout=min(_CONNECT_SECONDS, deadline.remaining))
        try:
            connection.connect()
            connection.sock.settimeout(deadline.socket_timeout(what))
            body = None if call.body is None else json.dumps(call.body).encode()
            connection.request("GET" if body is None else "POST", call.path, body, self._headers)
            response = connection.getresponse()
            status, data = response.status, response.read()
        except TimeoutError as error:
            if deadline.over:
                raise deadline.error(what) from error
            raise ReplicaLostError(f"{what}: no connection within {_CONNECT_SECONDS:.0f} s") from error
        except (OSError, HTTPException) as error:
            raise ReplicaLostError(f"{what}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        return _read(what, status, data)


def _read(what: str, status: int, data: bytes) -> Any:
    shown = data[:_SHOWN].decode(errors="replace").strip()
    if status != 200:
        raise SglangError(f"{what}: {status} {shown}")
    try:
        answer = json.loads(data) if data.strip() else None
    except ValueError as error:
        raise SglangError(f"{what}: the answer is no JSON: {shown}") from error
    if isinstance(answer, dict) and answer.get("success") is False:
        raise SglangError(f"{what}: {answer.get('message') or answer.get('error_message') or shown}")
    return answer
