"""A target's own answers to training questions: what its draft has to agree with.

Sampled at temperature 1 (DistillSpec, Zhou et al., ICLR 2024, arXiv:2310.08461, trains on samples
of the models, not on the data alone), or greedy. The question may be the model's own too: given the
beginning of its user's turn it goes on with one (Magpie, Xu et al., arXiv:2406.08464). Kept as JSON
lines, so that a stopped run goes on where it was.
"""

import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from specbench_cli.engine.models.decoder import Decoder, Part, State
from specbench_cli.engine.models.state import KVState
from specbench_cli.engine.types import Tokens
from specbench_cli.errors import UsageError
from specbench_cli.training.corpus import (
    GSM8K_FILE,
    PROMPT_WEIGHT,
    Chat,
    Encoder,
    TemplateEncoder,
)
from specbench_cli.training.packing import Encoded, Packed

AT_ONCE = 48
"""Sequences decoded together: each forward reads the weights once for all."""

MAX_ANSWER = 256
MAX_QUESTION = 160
MIN_QUESTION = 4
LONGEST = 512
"""Tokens of a question and its answer at most: a packed sequence holds as many."""


class Ask(NamedTuple):
    """What a target goes on from.

    ids: the prompt up to where the answer begins; with `then`, to where the question does.
    then: what ends a question and begins its answer; the model says the question itself up to the
        first of these tokens, and is given the others.
    greedy: whether the answer is the likeliest token each time. A question is drawn in any case.
    """

    ids: Sequence[int]
    then: Sequence[int] = ()
    greedy: bool = False


class Reply(NamedTuple):
    """Token ids of a prompt and of the answer, which ends by an EOS where that came in time."""

    prompt: list[int]
    answer: list[int]

    def encoded(self) -> Encoded:
        """The reply with its weights in a loss."""
        weights = [PROMPT_WEIGHT] * len(self.prompt) + [1.0] * len(self.answer)
        return Encoded([*self.prompt, *self.answer], weights)


def asked(encode: Encoder, chats: Sequence[Chat], greedy: bool = False) -> list[Ask]:
    """The first questions of chats."""
    return [Ask(encode.prompt(chat[0][0]), greedy=greedy) for chat in chats]


PROBLEMS_SHARE = 4
SAMPLED_SHARE = 4
"""One ask in so many is a problem of GSM8K, one answer in so many is drawn."""


def own_asks(encode: TemplateEncoder, problems: Sequence[Chat], seed: int, n: int) -> list[Ask]:
    """`n` asks for a model of any kind: GSM8K's problems among questions of its own.

    The first ones are the same for any `n`. Once all problems were asked, their answers are drawn.

    Args:
        problems: read in a seeded order, over and over; none: its own questions alone.

    Raises:
        UsageError: there is nothing to ask.
    """
    if not problems and not encode.answers:
        raise UsageError(
            "by this chat template a model cannot be asked for questions of its own",
            f"give problems to ask: --data DIR with {GSM8K_FILE}",
        )
    order = list(range(len(problems)))
    random.Random(f"problems/{seed}").shuffle(order)
    asks, asked_before = list[Ask](), 0
    for number in range(n):
        if problems and (number % PROBLEMS_SHARE == 0 or not encode.answers):
            question = problems[order[asked_before % len(order)]][0][0]
            greedy = asked_before < len(order) and asked_before % SAMPLED_SHARE > 0
            asks.append(Ask(encode.prompt(question), greedy=greedy))
            asked_before += 1
        else:
            asks.append(Ask(encode.asks, encode.answers, number % (SAMPLED_SHARE + 1) > 0))
    return asks


def sample_replies(
    target: Callable[[], Decoder],
    asks: Sequence[Ask],
    ends: Collection[int],
    file: Path,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[int, Reply]:
    """The target's replies by their number in `asks`; those that `file` holds are kept.

    Each has draws of its own, whatever was decoded beside it.

    Args:
        target: what makes the model, called if a reply is lacking.
        ends: tokens that end an answer.
        progress: told how many are done, after each.

    Returns:
        those to asks that led to one: a question that does not end in time, or that the sequence
        has no room for, leads to none.
    """
    done = _read(file)
    if len(done.keys() & range(len(asks))) < len(asks):
        with _alone(file), file.open("a", encoding="utf-8") as log:
            log.truncate(_whole(file))
            done = _read(file)
            lacking = [(number, ask) for number, ask in enumerate(asks) if number not in done]
            for number, reply in _replies(target(), lacking, ends, seed):
                done[number] = reply
                row = {"chat": number, "prompt": reply.prompt, "answer": reply.answer}
                log.write(json.dumps(row) + "\n")
                log.flush()
                progress(len(done))
    return {number: done[number] for number in range(len(asks)) if done[number].answer}


class Replies(Packed):
    """Replies over and over, in a fixed order; made when the first one is needed."""

    def __init__(self, padding: int, make: Callable[[], Sequence[Encoded]]) -> None:
        super().__init__(padding)
        self._make = make
        self._replies: Sequence[Encoded] | None = None
        self._drawn = 0

    def draw(self) -> Encoded:
        """The next reply.

        Raises:
            UsageError: there is none.
        """
        if self._replies is None:
            self._replies = self._make()
        if not self._replies:
            raise UsageError(
                "none of the target's replies can be trained on: none ended in time",
                "train the target for longer, or give another --target",
            )
        self._drawn += 1
        return self._replies[(self._drawn - 1) % len(self._replies)]

    def place(self) -> dict[str, Any]:
        """How many were drawn."""
        return {"drawn": self._drawn}

    def go_to(self, place: dict[str, Any]) -> None:
        """Continue after as many."""
        self._drawn = place["drawn"]


@dataclass(slots=True)
class _Line:
    """A reply in the making. fed: what its next forward reads; said: tokens of the answer, or of
    the question while that is being asked."""

    number: int
    ask: Ask
    state: State
    chance: random.Random
    fed: list[int]
    prompt: list[int]
    asking: bool
    said: list[int] = field(default_factory=list)

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn."""
        return self.asking or not self.ask.greedy

    def take(self, token: int, ends: Collection[int]) -> Reply | None:
        """Go on with a token; the reply, once it is whole or nothing will come of it."""
        room = LONGEST - len(self.prompt) - len(self.said) - 1
        if not self.asking:
            self.said.append(token)
            self.fed = [token]
            whole = token in ends or len(self.said) >= MAX_ANSWER or not room
            return Reply(self.prompt, self.said) if whole else None
        if token == self.ask.then[0]:
            self.prompt += [*self.said, *self.ask.then]
            self.fed = list(self.ask.then)
            short = len(self.said) < MIN_QUESTION
            self.said, self.asking = [], False
            return Reply(self.prompt, []) if short else None
        self.said.append(token)
        self.fed = [token]
        fails = token in ends or len(self.said) > MAX_QUESTION
        return Reply([*self.prompt, *self.said], []) if fails else None


@torch.inference_mode()
def _replies(
    target: Decoder, asks: Sequence[tuple[int, Ask]], ends: Collection[int], seed: int
) -> Iterator[tuple[int, Reply]]:
    """The replies, each as soon as it is whole; the next ask takes its place."""
    free = _states(target)
    begin, shared = _beginning(target, [ask for _, ask in asks])
    waiting, live = iter(asks), dict[int, _Line]()
    while True:
        while free and (following := next(waiting, None)) is not None:
            number, ask = following
            if len(ask.ids) > LONGEST // 2:
                yield number, Reply(list(ask.ids), [])
                continue
            state, chance = free.pop(), random.Random(f"reply/{seed}/{number}")
            state.clear()
            if begin is not None and isinstance(state, KVState):
                for mine, read in zip(state.buffers, begin.buffers, strict=True):
                    mine[..., :shared, :].copy_(read[..., :shared, :])
                state.extend(0, range(target.n_layers), shared)
                state.commit(0, range(shared))
            ids = list(ask.ids)
            live[number] = _Line(number, ask, state, chance, ids[shared:], ids, bool(ask.then))
        if not live:
            return
        lines = list(live.values())
        parts = [
            Part(Tokens(torch.tensor([line.fed], device=target.device)), line.state)
            for line in lines
        ]
        logits = [
            out.logits[0, -1] for out in target.forward_batch(parts) if out.logits is not None
        ]
        for line, token in zip(lines, _chosen(torch.stack(logits), lines), strict=True):
            line.state.commit(0, range(len(line.fed)))
            reply = line.take(token, ends)
            if reply is not None:
                free.append(live.pop(line.number).state)
                yield line.number, reply


def _states(target: Decoder) -> list[State]:
    """Room for `AT_ONCE` sequences, in one piece of memory where a decoder's states can."""
    pool = target.new_state(LONGEST, AT_ONCE)
    if isinstance(pool, KVState):
        return [pool.line(place) for place in range(AT_ONCE)]
    return [target.new_state(LONGEST) for _ in range(AT_ONCE)]


def _beginning(target: Decoder, asks: Sequence[Ask]) -> tuple[KVState | None, int]:
    """The rows of what all asks begin with (a template's system prompt), read once; how many."""
    places = zip(*(ask.ids[:-1] for ask in asks), strict=False)
    shared = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, places))
    state = target.new_state(max(1, shared))
    if not shared or not isinstance(state, KVState):
        return None, 0
    ids = torch.tensor([list(asks[0].ids[:shared])], device=target.device)
    target.forward(Tokens(ids), state, logits_at=None)
    return state, shared


def _chosen(logits: Tensor, lines: Sequence[_Line]) -> list[int]:
    """A token a line from logits [lines, V]: the likeliest, or drawn by inverting the sums."""
    best: list[int] = logits.argmax(-1).tolist()
    drawn = [at for at, line in enumerate(lines) if line.draws]
    if drawn:
        sums = logits[drawn].float().softmax(-1).cumsum(-1)
        chances = torch.tensor([[lines[at].chance.random()] for at in drawn]).to(sums)
        found = torch.searchsorted(sums, chances * sums[:, -1:], right=True)
        for at, token in zip(drawn, found[:, 0].tolist(), strict=True):
            best[at] = min(token, logits.shape[-1] - 1)
    return best


def _whole(file: Path) -> int:
    """Bytes of the whole lines; a run that was killed may leave half a line more."""
    return file.read_bytes().rfind(b"\n") + 1 if file.is_file() else 0


def _read(file: Path) -> dict[int, Reply]:
    """The whole lines of the file."""
    lines = file.read_bytes()[: _whole(file)].splitlines() if file.is_file() else []
    rows: Iterator[Mapping[str, Any]] = map(json.loads, lines)
    return {row["chat"]: Reply(row["prompt"], row["answer"]) for row in rows}


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Keeps other processes from writing replies; raises UsageError where one does."""
    try:
        with FileLock(f"{file}.lock", timeout=0):
            yield
    except Timeout:
        raise UsageError(
            f"another process is writing {file.name} in {file.parent}",
            f"wait for it, or train on the first of its {len(_read(file))} replies: --replies N",
        ) from None
