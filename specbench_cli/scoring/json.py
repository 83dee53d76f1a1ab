"""JSON that is well formed, as RFC 8259 has it: nothing is said of what it holds."""

from __future__ import annotations

import json
from typing import NoReturn


def valid_json(text: str) -> bool:
    """Whether a whole text is one JSON value; white space around it is allowed."""
    try:
        # Kept as text: Python refuses to convert integers of more than 4,300 digits.
        json.loads(text, parse_constant=_refuse, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    """NaN and infinities, which Python reads and JSON does not know."""
    raise ValueError(constant)
