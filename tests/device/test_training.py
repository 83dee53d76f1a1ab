"""Training of heads on a simulated device: where tensors are, and which steps wait."""

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
def questions(monkeypatch):
    """Problems and generated questions with common beginnings, more than one batch."""
    for name, value in {"MAX_ANSWER": 9, "MAX_QUESTION": 30, "MAX_LENGTH": 96}.items():
        monkeypatch.setattr(replies, name, value)
    monkeypatch.setattr(replies, "DEVICE_BATCH_SIZE", 7)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    rng = random.Random(0)
    numbered = []
    for number in range(24):
        own = number % 4 > 0
        ids = [1, 5, *(rng.randrange(12, 96) for _ in range(2 if own else rng.randrange(3, 40)))]
        numbered.append((number, ReplyPrompt(ids, THEN if own else (), greedy=number % 3 > 0)))
    return numbered


def test_replies_and_rows_equal_the_cpus_with_one_wait_per_step(far, questions, monkeypatch):
    here = far.workspace(CPU).decoders["target"]
    due = {
        number: (reply, rows_kept)
        for number, reply, rows_kept in replies._generate_replies(
            here, questions, {END}, 0, CAPTURED_LAYERS
        )
    }
    there = far.workspace(FAR).decoders["target"]
    apart, spread = there._planner._attend_pool, []

    def over_gaps(*args, **kwargs):
        spread.append(len(kwargs["query_rows"]) - len(kwargs["which"]))
        apart(*args, **kwargs)

    monkeypatch.setattr(there._planner, "_attend_pool", over_gaps)
    found, waits, ran = {}, len(far.waited), there.ran
    with far.on(FAR):
        for number, reply, rows_kept in replies._generate_replies(
            there, questions, {END}, 0, CAPTURED_LAYERS
        ):
            rows = (
                None
                if rows_kept is None
                else (rows_kept.rows.shadow.clone(), rows_kept.best.shadow.clone())
            )
            found[number] = reply, rows
    assert found.keys() == due.keys()
    assert sum(bool(reply.answer) for reply, _ in found.values()) > 9
    for number, (reply, rows) in found.items():
        wanted, rows_kept = due[number]
        assert reply == wanted
        assert (rows is None) == (rows_kept is None)
        if rows is not None:
            torch.testing.assert_close(rows[0], rows_kept.rows, atol=2e-3, rtol=2e-3)
            assert (rows[1] == rows_kept.best).float().mean() > 0.95
    assert min(spread) > 0  # padded positions between them must not count
    assert set(far.waited[waits:]) == {"_choose_tokens"}
    beginning = 1
    assert len(far.waited) - waits == there.ran - ran - beginning


class MemoryFiles:
    """Rows of some replies, kept in memory."""

    def __init__(self, tokens, width, says):
        rng = np.random.default_rng(0)
        self._rows = rng.standard_normal((tokens, width)).astype(np.float16)
        self._best = rng.integers(0, says, tokens).astype(np.int32)

    def complete(self, replies, read):
        pass

    def open_arrays(self):
        return self._rows, self._best


def first_loss(place, device, kind, room):
    """Return a new head's loss on a batch of stored rows, which are on the device if `room`."""
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
    some_replies = [TrainingReply([1, 2, 3], [*range(4, 24)], 23 * at) for at in range(8)]
    width = config.hidden_size * (1 if kind == "eagle" else len(head.captured_layers) + 1)
    stored = CachedTargetOutput(
        MemoryFiles(8 * 23, width, 96), target, head.captured_layers, some_replies
    )
    assert isinstance(stored._rows, torch.Tensor) == (device == FAR and room)
    step = head_loss(head, target, head.recipe.losses["ttt"], False, stored)
    source = Replies(0, lambda: [reply.encode() for reply in some_replies])
    return lambda: step(source.batch(2, 64))


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_heads_loss_equals_the_cpus(far, places, kind, room, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30 if room else 1, 1 << 30))
    monkeypatch.setattr(losses, "autocast", lambda _: nullcontext())  # torch looks for a GPU
    due = first_loss(places["target"], CPU, kind, room)()
    with far.on(FAR, loading=True):
        found = first_loss(places["target"], FAR, kind, room)
    with far.on(FAR, loading=not room):  # without space on the device each batch fetches its rows
        loss = found()
    torch.testing.assert_close(loss.shadow, due, atol=1e-4, rtol=1e-3)
