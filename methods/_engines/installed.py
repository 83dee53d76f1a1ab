"""Whether an engine is installed."""

from __future__ import annotations

from importlib.util import find_spec

from specbench_cli.api import EnvironmentFault


def check_installed(name: str, package: str, engine: str, extra: str) -> None:
    """See that there is a package.

    Args:
        name: the method that needs it. engine: what it is called.
        extra: of specbench's, which installs it.
    Raises:
        EnvironmentFault: it is not installed; says how to.
    """
    if find_spec(package) is None:
        raise EnvironmentFault(
            f"{name} decodes by {engine}, which is not installed",
            f"pip install 'specbench-cli[{extra}]'",
        )
