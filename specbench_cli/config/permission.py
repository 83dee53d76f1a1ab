"""Permission to run programs that a folder names.

A plug-in that the user names on the command line always runs. A run folder or a `specbench.yaml` in
the working folder may come from another person. A plug-in that it names runs only if the user ran
the same file before, or permits it now. Permissions are stored in the user's cache, by path and
content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli.config import plugin_file
from specbench_cli.errors import UsageError
from specbench_cli.files import cache_folder

if TYPE_CHECKING:
    from specbench_cli.config.run import RunConfig

TRUST = "--trust"
"""Option that permits everything that a folder requests."""

KEY = "key"
"""The parameter, of any method, that names an environment variable to send to a server."""

_permitted: set[str] = set()
"""Digests that were permitted in this process, in case the cache is not writable."""


@dataclass(frozen=True)
class PermissionRequest:
    """Action that a folder requests and the user must permit.

    Attributes:
        what: description for the user.
        digest: hash of the action. Another file or other content needs a new permission.
    """

    what: str
    digest: str

    @property
    def is_granted(self) -> bool:
        """Return True if the user permitted this before."""
        return self.digest in _permitted or (_folder() / self.digest).is_file()


Check = Callable[[Sequence[PermissionRequest], str], None]
"""Function of the requests and the file they come from. Raises UsageError if not permitted."""


def plugin_requests(paths: Iterable[str]) -> list[PermissionRequest]:
    """Return a request for each existing plug-in file, and hold its content (see `plugin_file`)."""
    found = []
    for path in map(Path, paths):
        if path.is_file():
            content = plugin_file.pin(path)
            digest = _digest("plug-in", path.resolve(), sha256(content).hexdigest())
            found.append(PermissionRequest(f"the plug-in {path.resolve()}", digest))
    return found


def uncontained_request(place: Path, content: str) -> PermissionRequest:
    """Return the request to run generated code and its tests without containment.

    Args:
        place: the file that contains the setting.
        content: content of that file.
    """
    what = "code of answers and tests to be run without containment (uncontained)"
    return PermissionRequest(what, _digest("uncontained", place.resolve(), content))


def server_requests(config: RunConfig) -> list[PermissionRequest]:
    """Return a request for each server that prompts or environment variables are sent to.

    All methods are checked, since a method of a plug-in may send a key, too. With `tune`, the
    values of a sweep are included.
    """
    given: list[tuple[str, Mapping[str, Sequence[Any]]]] = [
        *(
            (row.name, {name: [value] for name, value in row.params.items()})
            for row in config.methods
        ),
        *(config.sweep or {}).items(),
    ]
    found = {}
    for method in dict.fromkeys(name for name, _ in given):
        own = [params for name, params in given if name == method]
        urls = [url for params in own for url in params.get("url", ()) if url]
        for url in urls:  # prompts may come from any file that the folder names as a task
            request = PermissionRequest(f"prompts to be sent to {url}", _digest("url", url))
            found[request.digest] = request
        for key in (key for params in own for key in params.get(KEY, ()) if key):
            for url in urls or [None]:
                what = f"the environment variable {key} to be sent to {url}"
                request = PermissionRequest(what, _digest("key", url, key))
                found[request.digest] = request
    return [*found.values()]


def collect_requests(config: RunConfig, place: Path) -> list[PermissionRequest]:
    """Return all requests of a configuration.

    Args:
        place: the file that stores the configuration.
    """
    loose = config.run_code and config.uncontained
    answers = [uncontained_request(place, config.model_dump_json())] if loose else []
    return [*plugin_requests(config.plugins), *answers, *server_requests(config)]


def permit(requests: Iterable[PermissionRequest]) -> None:
    """Store that the user permits these requests."""
    for request in requests:
        _permitted.add(request.digest)
        with suppress(OSError):
            _folder().mkdir(parents=True, exist_ok=True)
            (_folder() / request.digest).touch()


def check(requests: Sequence[PermissionRequest], source: str) -> None:
    """Raise UsageError unless the user permitted all requests.

    Args:
        source: the file that the requests come from.
    """
    missing = [request.what for request in requests if not request.is_granted]
    if missing:
        raise UsageError(
            f"{source} requests {', '.join(missing)}, which you did not permit before",
            hint=f"read it first; then permit it by adding {TRUST} to the command, or name it on"
            " the command line yourself",
        )


def permit_all(requests: Sequence[PermissionRequest], source: str) -> None:
    """Permit all requests, because the user passed `TRUST`."""
    permit(requests)


def is_enabled(value: Any) -> bool:
    """Return True if the raw value of a setting may mean yes."""
    return value not in (None, False, 0, "", "0", "false", "no", "off")


def find_changed_plugins(
    method_files: Mapping[str, str], paths: Iterable[str]
) -> list[tuple[str, str]]:
    """Return the plug-in methods whose file changed, each with the current checksum of the file.

    With several plug-ins the checksum is "another".

    Args:
        method_files: SHA-256 of the file of each plug-in method when the run began.
        paths: the current plug-in files.

    Raises:
        UsageError: a file does not exist.
    """
    now = []
    for path in paths:
        if not Path(path).is_file():
            raise UsageError(f"there is no plug-in file {path}", "--plugin FILE.py")
        now.append(sha256(plugin_file.pin(path)).hexdigest())
    seen = now[0] if len(now) == 1 else "another"
    return [(name, seen) for name, then in method_files.items() if then not in now]


def _folder() -> Path:
    return cache_folder() / "permitted"


def _digest(*words: object) -> str:
    return sha256("\0".join(map(str, words)).encode()).hexdigest()
