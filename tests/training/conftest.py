"""Commands of training leave no picture of their curves, unless a test is about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest

from specbench_cli.commands.training import _shared

DRAW = _shared._draw


@pytest.fixture(autouse=True, scope="session")
def _no_curves() -> Iterator[None]:
    """Each command draws those of its whole folder anew, which takes longer than a short stage."""
    with patch.object(_shared, "_draw", lambda *_: None):
        yield


@pytest.fixture(scope="session")
def curves() -> Callable[[], AbstractContextManager[object]]:
    """Has commands draw them, while what it gives is entered."""
    return lambda: patch.object(_shared, "_draw", DRAW)
