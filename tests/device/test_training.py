"""Heads are trained on a device that is not there: where tensors are, and who waits."""

import random

import pytest
import torch

from specbench_cli.training import replies
from specbench_cli.training.replies import Ask

CPU, FAR = torch.device("cpu"), torch.device("cuda", 0)
END = 0
THEN = (3, 9, 11)
TAPS = (0,)


@pytest.fixture
def asks(monkeypatch):
    """Problems, and questions of its own, which begin alike; more than are answered at once."""
    for name, value in {"MAX_ANSWER": 9, "MAX_QUESTION": 30, "LONGEST": 96}.items():
        monkeypatch.setattr(replies, name, value)
    monkeypatch.setattr(replies, "AT_ONCE_FAR", 7)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    rng = random.Random(0)
    made = []
    for number in range(24):
        own = number % 4 > 0
        ids = [1, 5, *(rng.randrange(12, 96) for _ in range(2 if own else rng.randrange(3, 40)))]
        made.append((number, Ask(ids, THEN if own else (), greedy=number % 3 > 0)))
    return made


def test_replies_and_rows_are_made_there_as_here_with_a_wait_a_step(far, asks):
    here = far.workspace(CPU).decoders["target"]
    due = {number: (reply, kept) for number, reply, kept in replies._replies(here, asks, {END}, 0, TAPS)}
    there = far.workspace(FAR).decoders["target"]
    found, waits, ran = {}, len(far.waited), there.ran
    with far.on(FAR):
        for number, reply, kept in replies._replies(there, asks, {END}, 0, TAPS):
            rows = None if kept is None else (kept.rows.shadow.clone(), kept.best.shadow.clone())
            found[number] = reply, rows
    assert found.keys() == due.keys()
    assert sum(bool(reply.answer) for reply, _ in found.values()) > 9
    for number, (reply, rows) in found.items():
        wanted, kept = due[number]
        assert reply == wanted
        assert (rows is None) == (kept is None)
        if rows is not None:
            torch.testing.assert_close(rows[0], kept.rows, atol=2e-3, rtol=2e-3)
            assert (rows[1] == kept.best).float().mean() > 0.95
    assert set(far.waited[waits:]) == {"_chosen"}
    beginning = 1
    assert len(far.waited) - waits == there.ran - ran - beginning
