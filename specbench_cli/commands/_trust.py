"""Asking the user for permission to run what a folder asks for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from specbench_cli import output
from specbench_cli.config import permission


def permission_check(trust: bool) -> permission.Check:
    """Return what decides on requests: the option, else the user at the terminal, else nobody."""
    return permission.permit_all if trust else _ask


def _ask(asked: Sequence[permission.PermissionRequest], source: str) -> None:
    """Ask at a terminal. Raises UsageError where there is none, or the answer is no."""
    lacking = [request for request in asked if not request.granted]
    if lacking and sys.stdin.isatty() and sys.stderr.isatty():
        output.note(f"{source} asks for {', '.join(request.what for request in lacking)}")
        if typer.confirm("Permit this from now on?", default=False, err=True):
            permission.permit(lacking)
    permission.check(asked, source)
