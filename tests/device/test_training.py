"""Heads are trained on a device that is not there: where tensors are, and who waits."""

import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from methods._heads.module import get_head_classes
from specbench_cli.engine.models.load import load_module
from specbench_cli.training import replies
from specbench_cli.training.heads import losses
from specbench_cli.training.heads.build import HeadSchedule, build_head
from specbench_cli.training.heads.losses import CachedTargetOutput, head_loss
from specbench_cli.training.replies import Replies, ReplyPrompt, TrainingReply

CPU, FAR = torch.device("cpu"), torch.device("cuda", 0)
END = 0
THEN = (3, 9, 11)
CAPTURED_LAYERS = (0,)


@pytest.fixture
def asks(monkeypatch):
    """Problems, and questions of its own, which begin alike; more than are answered at once."""
    for name, value in {"MAX_ANSWER": 9, "MAX_QUESTION": 30, "MAX_LENGTH": 96}.items():
        monkeypatch.setattr(replies, name, value)
    monkeypatch.setattr(replies, "DEVICE_BATCH_SIZE", 7)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    rng = random.Random(0)
    made = []
    for number in range(24):
        own = number % 4 > 0
        ids = [1, 5, *(rng.randrange(12, 96) for _ in range(2 if own else rng.randrange(3, 40)))]
        made.append((number, ReplyPrompt(ids, THEN if own else (), greedy=number % 3 > 0)))
    return made


def test_replies_and_rows_are_made_there_as_here_with_a_wait_a_step(far, asks, monkeypatch):
    here = far.workspace(CPU).decoders["target"]
    due = {
        number: (reply, kept)
        for number, reply, kept in replies._generate_replies(here, asks, {END}, 0, CAPTURED_LAYERS)
    }
    there = far.workspace(FAR).decoders["target"]
    apart, spread = there._planner._attend_pool, []

    def over_gaps(*args, **kwargs):
        spread.append(len(kwargs["query_rows"]) - len(kwargs["which"]))
        apart(*args, **kwargs)

    monkeypatch.setattr(there._planner, "_attend_pool", over_gaps)
    found, waits, ran = {}, len(far.waited), there.ran
    with far.on(FAR):
        for number, reply, kept in replies._generate_replies(
            there, asks, {END}, 0, CAPTURED_LAYERS
        ):
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
    assert min(spread) > 0  # places between them have nothing to say
    assert set(far.waited[waits:]) == {"_choose_tokens"}
    beginning = 1
    assert len(far.waited) - waits == there.ran - ran - beginning


class Files:
    """Rows of some replies, which lie in memory."""

    def __init__(self, tokens, width, says):
        rng = np.random.default_rng(0)
        self._rows = rng.standard_normal((tokens, width)).astype(np.float16)
        self._best = rng.integers(0, says, tokens).astype(np.int32)

    def complete(self, replies, read):
        pass

    def open_arrays(self):
        return self._rows, self._best


def first_loss(place, device, kind, room):
    """A new head's loss on a batch of kept rows, which are on a device that has room for them."""
    target = load_module(place, device, torch.float32)
    config = target.config
    schedule = replace(
        HeadSchedule.for_target(get_head_classes()[kind], "tiny", 16), draft_vocab_size=40
    )
    answers = [token % config.vocab_size for token in range(300)]
    head = build_head(
        schedule,
        config,
        0,
        answers,
        lambda captured_layers: torch.ones(len(captured_layers) * config.hidden_size),
    ).to(device)
    given = [TrainingReply([1, 2, 3], [*range(4, 24)], 23 * at) for at in range(8)]
    width = config.hidden_size * (1 if kind == "eagle" else len(head.captured_layers) + 1)
    kept = CachedTargetOutput(Files(8 * 23, width, 96), target, head.captured_layers, given)
    assert isinstance(kept._rows, torch.Tensor) == (device == FAR and room)
    step = head_loss(head, target, head.recipe.losses["ttt"], False, kept)
    source = Replies(0, lambda: [reply.encode() for reply in given])
    return lambda: step(source.batch(2, 64))


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_heads_loss_is_made_there_as_here(far, places, kind, room, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30 if room else 1, 1 << 30))
    monkeypatch.setattr(losses, "autocast", lambda _: nullcontext())  # torch looks for a GPU
    due = first_loss(places["target"], CPU, kind, room)()
    with far.on(FAR, loading=True):
        found = first_loss(places["target"], FAR, kind, room)
    with far.on(FAR, loading=not room):  # without room each batch asks for rows by their numbers
        loss = found()
    torch.testing.assert_close(loss.shadow, due, atol=1e-4, rtol=1e-3)
