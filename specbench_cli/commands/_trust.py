"""Question whether plug-ins that a run folder or `specbench.yaml` names may run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from specbench_cli import output
from specbench_cli.config import permission


def permission_check(trust: bool) -> permission.Check:
    """Return the function that checks permissions (see `config.permission`).

    Args:
        trust: True permits everything (`--trust`). False asks the user at a terminal, and raises
            UsageError without a terminal.
    """
    return permission.permit_all if trust else _ask


def _ask(requests: Sequence[permission.PermissionRequest], source: str) -> None:
    """Ask the user at a terminal. Raise UsageError if there is no terminal or the answer is no."""
    missing = [request for request in requests if not request.is_granted]
    if missing and sys.stdin.isatty() and sys.stderr.isatty():
        output.note(f"{source} requests {', '.join(request.what for request in missing)}")
        if typer.confirm("Permit this from now on?", default=False, err=True):
            permission.permit(missing)
    permission.check(requests, source)
