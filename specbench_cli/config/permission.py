"""Permissions for plug-ins and other programs that a run folder or `specbench.yaml` names.

These files may come from another person, e.g. in a cloned repository. If they name a plug-in,
specbench runs it only if the user permitted the same file before, or permits it now. A plug-in
named on the command line always runs. Permissions are stored in the user's cache. They are valid
for one path and one content.
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
"""Name of the method parameter that names an environment variable with a server's API key."""

_permitted: set[str] = set()
"""Digests of the requests permitted in this process. Needed if the cache is not writable."""


@dataclass(frozen=True)
class PermissionRequest:
    """An action that a config file or run folder requests, and that the user must permit.

    Attributes:
        what: description of the action for the user.
        digest: hash of the action. For a plug-in, it includes the content of the file, so a changed
            plug-in needs a new permission.
    """

    what: str
    digest: str

    @property
    def is_granted(self) -> bool:
        """True if the user already permitted this action earlier."""
        return self.digest in _permitted or (_folder() / self.digest).is_file()


Check = Callable[[Sequence[PermissionRequest], str], None]
"""Function of requests and the file that contains them. Raises UsageError if not permitted."""


def plugin_requests(paths: Iterable[str]) -> list[PermissionRequest]:
    """Return a permission request for each plug-in file that exists.

    The content of the file is kept in memory (pinned), so the same bytes are imported later.
    """
    found = []
    for path in map(Path, paths):
        if path.is_file():
            content = plugin_file.pin(path)
            digest = _digest("plug-in", path.resolve(), sha256(content).hexdigest())
            found.append(PermissionRequest(f"the plug-in {path.resolve()}", digest))
    return found


def uncontained_request(place: Path, content: str) -> PermissionRequest:
    """Return the permission request to run generated code and its tests without a sandbox.

    Args:
        place: the config file with the setting `uncontained`.
        content: content of that file.
    """
    what = "code of answers and tests to be run without containment (uncontained)"
    return PermissionRequest(what, _digest("uncontained", place.resolve(), content))


def server_requests(config: RunConfig) -> list[PermissionRequest]:
    """Return a permission request for each server to which methods send prompts or API keys.

    The servers come from the parameters `url` and `key` of all methods, including swept values.
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
        for url in urls:  # a task may be any file, so prompts may be private
            request = PermissionRequest(f"prompts to be sent to {url}", _digest("url", url))
            found[request.digest] = request
        for key in (key for params in own for key in params.get(KEY, ()) if key):
            for url in urls or [None]:
                what = f"the environment variable {key} to be sent to {url}"
                request = PermissionRequest(what, _digest("key", url, key))
                found[request.digest] = request
    return [*found.values()]


def collect_requests(config: RunConfig, place: Path) -> list[PermissionRequest]:
    """Return all permission requests that a run's settings need.

    Args:
        place: the file that contains the settings.
    """
    loose = config.run_code and config.uncontained
    answers = [uncontained_request(place, config.model_dump_json())] if loose else []
    return [*plugin_requests(config.plugins), *answers, *server_requests(config)]


def permit(requests: Iterable[PermissionRequest]) -> None:
    """Store that the user permitted these requests."""
    for request in requests:
        _permitted.add(request.digest)
        with suppress(OSError):
            _folder().mkdir(parents=True, exist_ok=True)
            (_folder() / request.digest).touch()


def check(requests: Sequence[PermissionRequest], source: str) -> None:
    """Raise UsageError unless the user permitted all requests.

    Args:
        source: the file that contains the requests.
    """
    missing = [request.what for request in requests if not request.is_granted]
    if missing:
        raise UsageError(
            f"{source} requests {', '.join(missing)}, which you have not permitted",
            hint=f"read the file first; then add {TRUST} to the command to permit it, or give the"
            " same option on the command line",
        )


def permit_all(requests: Sequence[PermissionRequest], source: str) -> None:
    """Permit all requests, because the user gave `--trust`."""
    permit(requests)


def is_enabled(value: Any) -> bool:
    """Return True if the text or value of a switch may mean "on", before it is validated."""
    return value not in (None, False, 0, "", "0", "false", "no", "off")


def find_changed_plugins(
    method_files: Mapping[str, str], paths: Iterable[str]
) -> list[tuple[str, str]]:
    """Return the plug-in methods whose file changed since the run began.

    Returns:
        The current SHA-256 of each method's file, by method. If several files could be the plug-in,
        the word "another" replaces the SHA-256.

    Args:
        method_files: SHA-256 of the file when the run began, by method.
        paths: the current plug-in files.

    Raises:
        UsageError: a file does not exist.
    """
    now = []
    for path in paths:
        if not Path(path).is_file():
            raise UsageError(f"the plug-in file {path} does not exist", "--plugin FILE.py")
        now.append(sha256(plugin_file.pin(path)).hexdigest())
    seen = now[0] if len(now) == 1 else "another"
    return [(name, seen) for name, then in method_files.items() if then not in now]


def _folder() -> Path:
    return cache_folder() / "permitted"


def _digest(*words: object) -> str:
    return sha256("\0".join(map(str, words)).encode()).hexdigest()
