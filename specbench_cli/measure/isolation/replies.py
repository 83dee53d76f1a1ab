"""Replies of a plug-in process. The main process can read them without executing code.

The format is pickle, restricted to plain data and the classes of measurements. Instead of an object
of such a class, the pickle contains the name of the class and the fields of the object. A pickle
that refers to any other class or function is rejected, because it could execute code in the main
process.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbench_cli.measure.measurement import DecodedOutput


@dataclass(frozen=True)
class MeasurementReply:
    """Result of a measurement in a plug-in process.

    delay_ns: Time in ns by which learning delays the next prompt.
    lost: Error message if a worker process of the method ended. Else None.
    """

    output: DecodedOutput | None
    delay_ns: int
    lost: str | None


def dump(answer: object) -> bytes:
    """Return a reply encoded as bytes."""
    stream = io.BytesIO()
    _Writer(stream).dump(answer)
    return stream.getvalue()


def load(content: bytes) -> Any:
    """Return the reply that `dump` encoded.

    Raises:
        Exception: the bytes contain anything other than plain data and measurements.
    """
    return _Reader(io.BytesIO(content)).load()


@cache
def _classes() -> dict[str, type[Any]]:
    """Return the classes whose objects a reply may contain, by name."""
    # Import here and not at the top, because these modules import torch, which takes a second.
    from specbench_cli.measure.measurement import DecodedOutput
    from specbench_cli.store import schema

    of_records = (
        *(
            schema.BatchMembership,
            schema.DraftedTokens,
            schema.ForwardKind,
            schema.Likelihood,
            schema.Ns,
        ),
        *(schema.Params, schema.Record, schema.Steps, schema.Trace, schema.Verdict),
    )
    return {each.__name__: each for each in (MeasurementReply, DecodedOutput, *of_records)}


class _Writer(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[str, dict[str, Any]] | None:
        """Return the class name and fields of a measurement, or None for another object."""
        name = type(obj).__name__
        if type(obj).__module__ == "builtins" or type(obj) is not _classes().get(name):
            return None
        return name, {each.name: getattr(obj, each.name) for each in fields(obj)}  # type: ignore[arg-type]


class _Reader(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        """Return an object of a measurement class. `pid` is a result of `persistent_id`."""
        name, values = pid
        if type(name) is not str or type(values) is not dict or name not in _classes():
            raise pickle.UnpicklingError(f"not a measurement: {name!r:.100}")
        return _classes()[name](**values)

    def find_class(self, module: str, name: str) -> Any:
        """Reject every class and function that the pickle refers to by module and name."""
        raise pickle.UnpicklingError(f"{module}.{name}")
