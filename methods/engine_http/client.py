"""HTTP client for inference servers.

The client follows no redirects and uses no proxy. It limits the size of a reply and the time to
wait for data. Error messages never contain the API key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import psutil
from pydantic import BaseModel, ValidationError

from specbench_cli.api import EnvironmentFault, UsageError

MAX_EVENT_BYTES = 2**20
MAX_REPLY_BYTES = 2**26
"""Maximum size of a reply in bytes. A longer reply is an error."""
_SHOWN = 200
"""Maximum number of characters of a reply that a message quotes."""

_Event = TypeVar("_Event", bound=BaseModel)


def normalize_url(url: str) -> str:
    """Return a server's URL without a trailing slash or `/v1`.

    Raises:
        ValueError: The text is not a URL, or it contains a user, a password, a query or a fragment.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"must be an address such as http://127.0.0.1:8000, got {url!r}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "must not contain a user, a password, ? or #; pass an API key in an environment"
            " variable"
        )
    return url.rstrip("/").removesuffix("/v1")


class SizeLimitedStream(httpx2.SyncByteStream):
    """Byte stream of a reply that raises an error after `MAX_REPLY_BYTES`.

    Args:
        stream: Byte stream of the connection.
        fault: Function that creates the exception from a description of the problem.
    """

    def __init__(self, stream: httpx2.SyncByteStream, fault: Callable[[str], Exception]) -> None:
        self._stream, self._fault = stream, fault

    def __iter__(self) -> Iterator[bytes]:
        read = 0
        for part in self._stream:
            read += len(part)
            if read > MAX_REPLY_BYTES:
                raise self._fault(f"sent a reply of more than {MAX_REPLY_BYTES >> 20} MiB")
            yield part

    def close(self) -> None:
        """Close the byte stream of the connection."""
        self._stream.close()


class HttpClient:
    """HTTP client for one server, with persistent connections.

    Args:
        url: URL as `normalize_url` returns it.
        name: Name of the method, for error messages.
        secret: API key, or None.
        timeout: Maximum time without data from the server, in seconds.
    """

    def __init__(self, url: str, name: str, secret: str | None, timeout: float) -> None:
        self._url, self._name, self._timeout = url, name, timeout
        self._secret = secret
        self._client = httpx2.Client(
            verify=url.startswith("https:"),  # loading certificates for http takes time
            timeout=timeout,
            trust_env=False,
            follow_redirects=False,
            headers={
                "Accept-Encoding": "identity",  # the size limit counts bytes before decompression
                **({"Authorization": f"Bearer {secret}"} if secret else {}),
            },
        )

    def read(self, path: str) -> str | None:
        """Return the body of the reply to a GET request. Return None if the status is not 200.

        Raises:
            EnvironmentFault: The request failed.
        """
        with self._open("GET", path) as reply:
            return self._text(reply) if reply.status_code == 200 else None

    def stream_events(
        self, path: str, body: dict[str, Any], kind: type[_Event]
    ) -> Iterator[_Event]:
        """Send a request and yield the events that the server streams.

        Args:
            path: Path of the endpoint.
            body: Body of the request, which is sent as JSON.
            kind: Class of the events.

        Raises:
            EnvironmentFault: The server is unreachable, times out, closes the connection, rejects
                the request, or sends events of another format.
        """
        with self._open("POST", path, body) as reply:
            if reply.status_code != 200:
                raise self.make_fault(f"rejected {path}: {reply.status_code} {self._text(reply)}")
            for event in httpx2.EventSource(reply, max_event_size=MAX_EVENT_BYTES):
                if event.data.strip() != "[DONE]":  # read on, so that the connection can be reused
                    yield self.parse(event.data, kind)

    def parse(self, text: str, kind: type[_Event]) -> _Event:
        """Parse a reply as an object of class `kind`.

        Raises:
            EnvironmentFault: The reply does not have the format of `kind`.
        """
        try:
            return kind.model_validate_json(text)
        except ValidationError:
            raise self.make_fault(f"sent an invalid reply: {self._quote(text)}") from None

    def make_fault(self, what: str, hint: str | None = None) -> EnvironmentFault:
        """Return the exception for a server error.

        `what` describes it, such as "sent an invalid reply".
        """
        found = self._quote(what, 3 * _SHOWN)
        return EnvironmentFault(f"the server at {self._url} {found}", hint or self._default_hint)

    def format_option(self, param: str, value: str) -> str:
        """Return the command-line option that sets a parameter of the method."""
        return f"--set {self._name}.{param}={value}"

    @property
    def _default_hint(self) -> str:
        return f"look at the server's log, or use another: {self.format_option('url', 'URL')}"

    @contextmanager
    def _open(self, verb: str, path: str, body: Any = None) -> Iterator[httpx2.Response]:
        """Send a request and yield the reply before its body is read."""
        try:
            with self._client.stream(verb, f"{self._url}/{path}", json=body) as reply:
                if reply.is_redirect:
                    raise self.make_fault(
                        f"redirects to {reply.headers.get('location')}; redirects are not followed",
                        f"to send requests there, use {self.format_option('url', 'URL')}",
                    )
                if packed := reply.headers.get("content-encoding"):
                    raise self.make_fault(f"sent its reply with the encoding {packed}")
                assert isinstance(reply.stream, httpx2.SyncByteStream)
                reply.stream = SizeLimitedStream(reply.stream, self.make_fault)
                yield reply
        except httpx2.TimeoutException:
            raise self.make_fault(
                f"sent no data for {self._timeout:g} s",
                f"{self._default_hint}, or wait longer: {self.format_option('timeout', 'SECONDS')}",
            ) from None
        except httpx2.ConnectError as error:
            hint = f"start it, or use another: {self.format_option('url', 'URL')}"
            raise self.make_fault(f"cannot be reached: {error}", hint) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            what = str(error) or type(error).__name__
            raise self.make_fault(f"sent no complete reply: {what}") from None

    def _text(self, reply: httpx2.Response) -> str:
        return reply.read().decode("utf-8", "replace")

    def _quote(self, text: str, most: int = _SHOWN) -> str:
        """Return text from the server for an error message: one line, no API key, no control
        characters.
        """
        line = " ".join(text.split())
        if self._secret:
            line = line.replace(self._secret, "***")
        shown = "".join(each if each.isprintable() else "?" for each in line[:most])
        return shown + "..." * (len(line) > most)

    def find_processes(self) -> Sequence[int]:
        """Return the process ids of the server if it runs on this machine.

        They listen at its port.
        """
        parts = urlsplit(self._url)
        if not _is_here(parts.hostname or ""):
            return ()
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        try:
            found = psutil.net_connections("tcp")
        except (psutil.Error, OSError):
            return ()
        own = (each for each in found if each.status == psutil.CONN_LISTEN and each.laddr)
        return sorted({each.pid for each in own if each.laddr.port == port and each.pid})


def read_secret(url: str, name: str, key: str | None) -> str | None:
    """Return the API key of a server. It is read from an environment variable.

    Raises:
        UsageError: The variable is not set, or the key would be sent over a network without
            encryption.
    """
    if key is None:
        return None
    if not os.environ.get(key):
        raise UsageError(
            f"{name}: the environment variable {key!r}, which must contain the API key, is not set",
            f"set it, or remove --set {name}.key",
        )
    parts = urlsplit(url)
    if parts.scheme != "https" and not _is_here(parts.hostname or ""):
        raise UsageError(
            f"{name}: the API key would be sent to {parts.hostname} without encryption",
            f"use --set {name}.url=https://..., or remove --set {name}.key",
        )
    return os.environ[key]


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
