"""Benchmark of speculative decoding: speed, acceptance, and equality of outputs.

    import specbench_cli as sb

    run = sb.run(methods=["sps", "pld"], tasks=["mini"], limit=12, max_new_tokens=64)
    run.summary

docs/how-to/python.md describes the Python API. Its names are imported on first use, because they
need torch and pandas, which take seconds to import.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["ComparisonResult", "Run", "SpecbenchError", "compare", "load", "methods", "run"]

if TYPE_CHECKING:
    from specbench_cli.errors import SpecbenchError
    from specbench_cli.python import ComparisonResult, Run, compare, load, methods, run
else:

    def __getattr__(name: str) -> Any:
        if name == "Compared":
            warnings.warn(
                "specbench_cli.Compared is now specbench_cli.ComparisonResult",
                DeprecationWarning,
                stacklevel=2,
            )
            name = "ComparisonResult"
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from specbench_cli import errors, python

        return getattr(errors if name == "SpecbenchError" else python, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
