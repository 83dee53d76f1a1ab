"""The final number of an answer, as GSM8K is scored.

GSM8K's references end in `#### N`. An answer in that form is taken at its word; of any other the
last number counts (lm-evaluation-harness's "flexible-extract"), since chat models close with a
sentence. `$`, `%`, commas between thousands and a final full stop are no part of a number, and
18.00 is 18.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


def same_final_number(reference: str, answer: str) -> bool:
    """Whether both end in the same number; False if either has none."""
    expected = final_number(reference)
    return expected is not None and expected == final_number(answer)


def final_number(text: str) -> Decimal | None:
    """The number after the first `####`, else the last number; None if there is none."""
    marked = _MARKED.search(text)
    found = [marked[1]] if marked else _ANY.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None
