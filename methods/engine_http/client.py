"""A server that decodes, as it is talked to: no redirect is followed and no proxy used, replies
have limits of size and of silence, and an API key is in no message."""

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
"""Of a reply: more is refused."""
_SHOWN = 200
"""Characters of a reply that a message quotes."""

_Event = TypeVar("_Event", bound=BaseModel)


def normalize_url(url: str) -> str:
    """An address without a key or a question in it, and without the `/v1` that some end with.

    Raises:
        ValueError: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"must be an address such as http://127.0.0.1:8000, got {url!r}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("must hold neither user, password, ? nor #: a key is read from a variable")
    return url.rstrip("/").removesuffix("/v1")


class _Bounded(httpx2.SyncByteStream):
    """Byte stream of a reply that counts all bytes: events, comments and line ends.

    Args:
        stream: The stream of the connection.
        fault: Function that returns the error for a reply of more than `MAX_REPLY_BYTES`.
    """

    def __init__(self, stream: httpx2.SyncByteStream, fault: Callable[[str], Exception]) -> None:
        self._stream, self._fault = stream, fault

    def __iter__(self) -> Iterator[bytes]:
        read = 0
        for part in self._stream:
            read += len(part)
            if read > MAX_REPLY_BYTES:
                raise self._fault(f"sends more than {MAX_REPLY_BYTES >> 20} MiB")
            yield part

    def close(self) -> None:
        """Close the connection's stream."""
        self._stream.close()


class HttpClient:
    """Requests to one server, over connections that are kept.

    Args:
        url: as `normalize_url` has it.
        name: the method that asks, for the commands that errors name.
        secret: an API key; None: none is sent.
        timeout: seconds of silence that are waited for.
    """

    def __init__(self, url: str, name: str, secret: str | None, timeout: float) -> None:
        self._url, self._name, self._timeout = url, name, timeout
        self._secret = secret
        self._client = httpx2.Client(
            verify=url.startswith("https:"),  # else certificates are read for nothing
            timeout=timeout,
            trust_env=False,
            follow_redirects=False,
            headers={
                "Accept-Encoding": "identity",  # no compression: received bytes are counted
                **({"Authorization": f"Bearer {secret}"} if secret else {}),
            },
        )

    def read(self, path: str) -> str | None:
        """The text at a path; None where the server has none to give. Raises EnvironmentFault."""
        with self._open("GET", path) as reply:
            return self._text(reply) if reply.status_code == 200 else None

    def events(self, path: str, body: dict[str, Any], kind: type[_Event]) -> Iterator[_Event]:
        """What is streamed in reply to a request, as it comes.

        Raises:
            EnvironmentFault: the server is not there, is silent, breaks off, refuses, or streams
                what is no `kind`.
        """
        with self._open("POST", path, body) as reply:
            if reply.status_code != 200:
                raise self.fault(f"refuses {path}: {reply.status_code} {self._text(reply)}")
            for event in httpx2.EventSource(reply, max_event_size=MAX_EVENT_BYTES):
                if event.data.strip() != "[DONE]":  # read to the end, the connection can be kept
                    yield self.parse(event.data, kind)

    def parse(self, text: str, kind: type[_Event]) -> _Event:
        """A reply as what it should be. Raises EnvironmentFault: it is something else."""
        try:
            return kind.model_validate_json(text)
        except ValidationError:
            raise self.fault(f"answers nonsense: {self._quote(text)}") from None

    def fault(self, what: str, hint: str | None = None) -> EnvironmentFault:
        """An error that names the server, with what to do about it."""
        found = self._quote(what, 3 * _SHOWN)
        return EnvironmentFault(f"the server at {self._url} {found}", hint or self._default_hint)

    def option(self, param: str, value: str) -> str:
        """How a parameter of the method is typed."""
        return f"--set {self._name}.{param}={value}"

    @property
    def _default_hint(self) -> str:
        return f"look at its log, or {self.option('url', 'URL')} for another"

    @contextmanager
    def _open(self, verb: str, path: str, body: Any = None) -> Iterator[httpx2.Response]:
        """A reply whose body has not come yet."""
        try:
            with self._client.stream(verb, f"{self._url}/{path}", json=body) as reply:
                if reply.is_redirect:
                    raise self.fault(
                        f"sends on to {reply.headers.get('location')}: no redirect is followed",
                        f"{self.option('url', 'URL')} with the address itself, if you trust it",
                    )
                if packed := reply.headers.get("content-encoding"):
                    raise self.fault(f"sends its answer as {packed}, which was not asked for")
                assert isinstance(reply.stream, httpx2.SyncByteStream)
                reply.stream = _Bounded(reply.stream, self.fault)
                yield reply
        except httpx2.TimeoutException:
            raise self.fault(
                f"said nothing for {self._timeout:g} s",
                f"{self._default_hint}, or {self.option('timeout', 'SECONDS')} for a slow one",
            ) from None
        except httpx2.ConnectError as error:
            hint = f"start it, or {self.option('url', 'URL')} for another"
            raise self.fault(f"cannot be reached: {error}", hint) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self.fault(f"broke off: {str(error) or type(error).__name__}") from None

    def _text(self, reply: httpx2.Response) -> str:
        return reply.read().decode("utf-8", "replace")

    def _quote(self, text: str, most: int = _SHOWN) -> str:
        """Words of the server's, in one line that holds no key and moves no cursor."""
        line = " ".join(text.split())
        if self._secret:
            line = line.replace(self._secret, "***")
        shown = "".join(each if each.isprintable() else "?" for each in line[:most])
        return shown + "..." * (len(line) > most)

    def processes(self) -> Sequence[int]:
        """Those that listen at its port, where it is on this machine and may be seen."""
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
    """The API key that an environment variable holds, for a server at a url.

    Raises:
        UsageError: there is no such variable, or the key would cross a network in the clear.
    """
    if key is None:
        return None
    if not os.environ.get(key):
        raise UsageError(
            f"{name}: there is no environment variable {key!r}, which is to hold the API key",
            f"export it, or drop --set {name}.key",
        )
    parts = urlsplit(url)
    if parts.scheme != "https" and not _is_here(parts.hostname or ""):
        raise UsageError(
            f"{name}: an API key would cross the network to {parts.hostname} in the clear",
            f"--set {name}.url=https://..., or drop --set {name}.key",
        )
    return os.environ[key]


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
