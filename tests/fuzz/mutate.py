"""Mutation of valid inputs into invalid ones: values, keys and bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Path = tuple[int | str, ...]
"""Keys and indices that lead to a value."""

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400),
    *(0.5, -0.5, 1.5, -0.0, 1e-40, 1e-320, 1e300, -1e300, float("nan"), float("inf")),
    *("", " ", "x", "0", "-1", "nan", "true", "null", "\ud800", "a\udfffb", "\0", "\x1b[2J", "\n"),
    *("\u202eevil", "\u2028", "=1+1", "@SUM(A1)", "<script>", "../../etc/passwd", "/etc/passwd"),
    *("a" * 300, "é" * 5000, "%s{0}{x}", "\\", "$HOME", "|", "`id`", "N/A", "\uff11"),
    *([], {}, [None], [[]], [-1], [0, 0], {"": 0}, {"a": {"a": {"a": []}}}, [1, "2", None]),
)
"""Values that replace another value."""


def changed(rng: Random, data: Any, times: int) -> tuple[Any, list[Path]]:
    """Return the data with some values, keys or entries changed in place, and the changed paths."""
    paths: list[Path] = []
    for _ in range(times):
        places = list(_places(data))
        if not places:
            break
        owner, key, path = rng.choice(places)
        paths.append(path)
        rng.choices(_CHANGES, _WEIGHTS)[0](rng, owner, key)
    return data, paths


def bytes_changed(rng: Random, data: bytes) -> bytes:
    """Return a copy with some bytes flipped, removed, repeated or inserted, or the end cut off."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at : at + rng.randint(1, 40)]
            case 2:
                found[at:at] = found[at : at + rng.randint(1, 40)]
            case 3:
                found[at:at] = rng.choice(_BYTES)
            case 4 if at < len(found):
                found[at] = rng.randrange(256)
            case _:
                del found[at:]
    return bytes(found)


def line(data: Any) -> str:
    """Return JSON as a careless program writes it: with NaN, Infinity and lone surrogates."""
    return json.dumps(data)


def _places(data: Any, path: Path = ()) -> Iterator[tuple[Any, Any, Path]]:
    """Yield values with owner and path. Of a long list, yield its ends and one entry between."""
    if isinstance(data, dict):
        keys: Any = list(data)
    elif isinstance(data, list):
        n = len(data)
        keys = range(n) if n < 4 else sorted({0, 1, n // 2, n - 1})
    else:
        return
    for key in keys:
        yield data, key, (*path, key)
        yield from _places(data[key], (*path, key))


def _replace(rng: Random, owner: Any, key: Any) -> None:
    owner[key] = copy.deepcopy(rng.choice(HOSTILE))


def _near(rng: Random, owner: Any, key: Any) -> None:
    value = owner[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 2**64:
        _replace(rng, owner, key)
        return
    owner[key] = rng.choice([value + 1, value - 1, -value, value * 2, value * 1000, value + 0.5])


def _delete(rng: Random, owner: Any, key: Any) -> None:
    del owner[key]


def _add(rng: Random, owner: Any, key: Any) -> None:
    if isinstance(owner, dict):
        owner[rng.choice(["", "x", "__class__", f"{key}2", "\ud800"])] = owner[key]
    else:
        owner.insert(key, copy.deepcopy(owner[key]))


def _swap(rng: Random, owner: Any, key: Any) -> None:
    other = rng.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
    owner[key], owner[other] = owner[other], owner[key]


def _nest(rng: Random, owner: Any, key: Any) -> None:
    owner[key] = [owner[key]] if rng.random() < 0.5 else {"x": owner[key]}


_CHANGES: tuple[Callable[[Random, Any, Any], None], ...] = (
    *(_replace, _near, _delete, _add, _swap, _nest),
)
_WEIGHTS = (6, 4, 2, 1, 1, 1)
_BYTES = (
    *(b"\xff", b"\0", b"\xed\xa0\x80", b"\xe2\x80\xae", b"\r\n", b"{", b"]", b'"', b"\\ud800"),
    *(b"NaN", b"1e999", b"-", b": ", b"&a [*a]", b"!!python/object:os.system ", b"9" * 5000),
)
