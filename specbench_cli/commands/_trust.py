"""Question to the user: may the plug-ins run that a run folder or `specbench.yaml` names?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from specbench_cli import output
from specbench_cli.config import permission


def permission_check(trust: bool) -> permission.Check:
    """Return the function that decides whether plug-ins and other programs may run.

    Args:
        trust: True permits all of them (option `--trust`). False asks the user at a terminal. If
            there is no terminal, the function raises UsageError.
    """
    return permission.permit_all if trust else _ask


def _ask(requests: Sequence[permission.PermissionRequest], source: str) -> None:
    """Ask the user at the terminal to permit the requests of a file.

    Args:
        source: the file that contains the requests.

    Raises:
        UsageError: there is no terminal, or the user does not permit the requests.
    """
    missing = [request for request in requests if not request.is_granted]
    if missing and sys.stdin.isatty() and sys.stderr.isatty():
        output.note(f"{source} requests {', '.join(request.what for request in missing)}")
        if typer.confirm("Permit this from now on?", default=False, err=True):
            permission.permit(missing)
    permission.check(requests, source)
