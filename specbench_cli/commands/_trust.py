"""Prompt for the user's permission to run the programs that a folder names."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from specbench_cli import output
from specbench_cli.config import permission


def permission_check(trust: bool) -> permission.Check:
    """Return the permission check.

    `--trust` permits everything. Otherwise the check asks at a terminal, and refuses without one.
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
