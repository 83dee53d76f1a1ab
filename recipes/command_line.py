"""Command lines of recipes. Their options, help, errors and exit codes work as in specbench."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import typer

from specbench_cli import app as specbench


def create_app(about: str, commands: Mapping[str, tuple[Callable[..., Any], str]]) -> typer.Typer:
    """Return a typer app with the given commands.

    Args:
        about: help text of the app.
        commands: for each command name, its function and the examples in its help.
    """
    app = typer.Typer(
        help=about,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": specbench.HELP},
    )
    app.callback()(_keep_names)
    for name, (function, examples) in commands.items():
        app.command(name, epilog=examples)(function)
    return app


def _keep_names() -> None:
    """Do nothing. Without a callback, typer makes the only command of an app run without its
    name.
    """


def main(app: typer.Typer, package: str) -> NoReturn:
    """Run the command line of a package that was started with `python -m`, then exit."""
    specbench.main(commands=app, program=f"python -m {package}")
