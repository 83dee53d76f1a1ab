"""A target's own answers to training questions: what its draft has to agree with.

Sampled at temperature 1 (DistillSpec, Zhou et al., ICLR 2024, arXiv:2310.08461, trains on samples
of the models, not on the data alone), or greedy. The question may be the model's own too: given the
beginning of its user's turn it goes on with one (Magpie, Xu et al., arXiv:2406.08464). Kept as JSON
lines, so that a stopped run goes on where it was.
"""

import json
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from io import BufferedWriter, TextIOWrapper
from itertools import accumulate, chain, repeat, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor

from specbench_cli import files
from specbench_cli.engine import host
from specbench_cli.engine.models.decoder import Decoder, ModelInput, State
from specbench_cli.engine.models.head import NORMED
from specbench_cli.engine.models.state import KVState
from specbench_cli.engine.types import ModelOutput, Tokens
from specbench_cli.errors import UsageError
from specbench_cli.training.corpus import (
    GSM8K_FILE,
    PROMPT_LOSS_WEIGHT,
    Chat,
    Encoder,
    TemplateEncoder,
)
from specbench_cli.training.packing import EncodedChat, PackedChats

BATCH_SIZE = 64
"""Sequences decoded together: each forward reads the weights once for all."""

DEVICE_BATCH_SIZE = 384
"""As many on an accelerator, which takes about as long to be called for any number of them."""

MEMORY_SHARE = 0.5
"""How much of an accelerator's free memory they may have, all together."""

LOGITS_BLOCK_ROWS = 512
"""Rows whose logits over a whole vocabulary are held at a time."""

MAX_ANSWER = 256
MAX_QUESTION = 160
MIN_QUESTION = 4
MAX_LENGTH = 512
"""Tokens of a question and its answer at most: a packed sequence holds as many."""


class ReplyPrompt(NamedTuple):
    """What a target goes on from.

    ids: the prompt up to where the answer begins; with `then`, to where the question does.
    then: what ends a question and begins its answer; the model says the question itself up to the
        first of these tokens, and is given the others.
    greedy: whether the answer is the likeliest token each time. A question is drawn in any case.
    """

    ids: Sequence[int]
    question_end: Sequence[int] = ()
    greedy: bool = False


class TrainingReply(NamedTuple):
    """Token ids of a prompt and of the answer, which ends by an EOS where that came in time.

    first: the row of its first token in `RowFiles`, where all replies of a file have theirs.
    """

    prompt: list[int]
    answer: list[int]
    first_row: int = 0

    @property
    def size(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(self.answer)

    def encode(self) -> EncodedChat:
        """The reply with its weights in a loss."""
        weights = [PROMPT_LOSS_WEIGHT] * len(self.prompt) + [1.0] * len(self.answer)
        return EncodedChat([*self.prompt, *self.answer], weights, self.first_row)


class TargetRows(NamedTuple):
    """A target's rows over some tokens.

    rows: fp16 [n, those of the captured layers side by side and the normed ones]. best: [n], the
    likeliest next tokens.
    """

    rows: Tensor
    best: Tensor


class HiddenStateFiles:
    """A target's rows over its replies, kept for heads to read many times: two files that grow
    reply by reply, in the order of the replies' lines.

    Args:
        folder: where they lie.
        captured_layers: the layers whose outgoing rows are kept; `NORMED` ones, which the target's
            output matrix reads, are in any case.
        width: numbers of one row.
    """

    def __init__(self, folder: Path, captured_layers: Sequence[int], width: int) -> None:
        self.captured_layers = tuple(layer for layer in captured_layers if layer != NORMED)
        self.width = (len(self.captured_layers) + 1) * width
        name = "features" + "".join(f"-{layer}" for layer in self.captured_layers)
        self._rows, self._best = folder / f"{name}.f16", folder / f"{name}.best.i32"
        self._mine = False

    def __len__(self) -> int:
        """Tokens that both hold."""
        rows, best = (f.stat().st_size if f.is_file() else 0 for f in (self._rows, self._best))
        return min(rows // (2 * self.width), best // 4)

    def complete(
        self, replies: Sequence[TrainingReply], read: Callable[[Sequence[int]], TargetRows]
    ) -> None:
        """Hold the rows of a file's first replies; `read` is asked for those that lack.

        Raises:
            UsageError: some do, and another process is writing them.
        """
        if sum(reply.size for reply in replies) <= len(self):
            return
        with self.lock():
            have = len(self)
            ends = (reply.first_row + reply.size for reply in replies)
            whole = max((end for end in ends if end <= have), default=0)
            self.truncate(whole)
            for reply in replies:
                if reply.first_row >= whole:
                    self.append(read([*reply.prompt, *reply.answer]))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes from writing these rows; raises UsageError where one does."""
        if self._mine:
            yield
            return
        with _lock_file(self._rows, f"train on replies whose rows it has: {len(self)} tokens"):
            self._mine = True
            try:
                yield
            finally:
                self._mine = False

    def truncate(self, tokens: int) -> None:
        """Forget what lies behind so many tokens."""
        for file, size in ((self._rows, 2 * self.width), (self._best, 4)):
            with _open_for_append(file) as held:
                held.truncate(size * tokens)

    def append(self, kept: TargetRows) -> None:
        """The rows of the next reply."""
        with _open_for_append(self._rows) as rows, _open_for_append(self._best) as best:
            rows.write(kept.rows.cpu().numpy().tobytes())
            best.write(kept.best.to(torch.int32).cpu().numpy().tobytes())

    def open_arrays(self) -> tuple[NDArray[np.float16], NDArray[np.int32]]:
        """Rows [tokens, numbers] and likeliest tokens [tokens], mapped into memory."""
        n = len(self)
        rows = np.memmap(self._rows, np.float16, "r", shape=(n, self.width))
        return rows, np.memmap(self._best, np.int32, "r", shape=(n,))


def make_prompts(encode: Encoder, chats: Sequence[Chat], greedy: bool = False) -> list[ReplyPrompt]:
    """The first questions of chats."""
    return [ReplyPrompt(encode.encode_prompt(chat[0][0]), greedy=greedy) for chat in chats]


PROBLEM_INTERVAL = 4
SAMPLED_INTERVAL = 4
"""One ask in so many is a problem of GSM8K, one answer in so many is drawn."""

OPENINGS = (
    *("Write a", "Write an email", "Write a short story about", "Compose a", "Draft a", "Rewrite"),
    *("Imagine you are", "Pretend to be", "Act as a", "You are a", "Let's play", "Assume the role"),
    *("Given the following", "Extract the", "From this text,", "List the", "Identify the", "Read"),
    *("If", "Suppose", "Which of these", "A man has", "There are", "Is it true that", "Solve"),
    *("Write a function", "Write a Python program", "Implement", "Fix this code:", "Design a"),
    *("Explain", "What is the difference between", "How does", "How do I", "Why do", "What causes"),
    *("Discuss", "Compare", "Analyze", "Who was", "When did", "Describe", "What are the main"),
    *("Summarize", "Translate", "Correct", "Suggest", "Give me", "Help me", "Can you", "I need"),
)
"""What some of its questions begin with, so that all kinds of tasks are among them: a small model
left to itself asks much of one kind."""


def make_magpie_prompts(
    encode: TemplateEncoder, problems: Sequence[Chat], seed: int, n: int
) -> list[ReplyPrompt]:
    """`n` asks for a model of any kind: GSM8K's problems among questions of its own, of which two
    in three begin with one of `OPENINGS`.

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
    asks, asked_before = list[ReplyPrompt](), 0
    for number in range(n):
        if problems and (number % PROBLEM_INTERVAL == 0 or not encode.answers):
            question = problems[order[asked_before % len(order)]][0][0]
            greedy = asked_before < len(order) and asked_before % SAMPLED_INTERVAL > 0
            asks.append(ReplyPrompt(encode.encode_prompt(question), greedy=greedy))
            asked_before += 1
        else:
            choice = random.Random(f"opening/{seed}/{number}")
            begun = encode.encode_text(choice.choice(OPENINGS)) if number % 2 else []
            greedy = number % (SAMPLED_INTERVAL + 1) > 0
            asks.append(ReplyPrompt([*encode.question_prefix, *begun], encode.answers, greedy))
    return asks


def sample_replies(
    target: Callable[[], Decoder],
    prompts: Sequence[ReplyPrompt],
    ends: Collection[int],
    file: Path,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
    rows: HiddenStateFiles | None = None,
) -> dict[int, TrainingReply]:
    """The target's replies by their number in `asks`; those that `file` holds are kept.

    Each has draws of its own, whatever was decoded beside it.

    Args:
        target: what makes the model, called if a reply is lacking.
        ends: tokens that end an answer.
        progress: told how many are done, after each.
        rows: where the target's rows over the replies are kept while they are made.

    Returns:
        those to asks that led to one: a question that does not end in time, or that the sequence
        has no room for, leads to none.
    """
    done = _read_replies(file)
    if len(done.keys() & range(len(prompts))) < len(prompts):
        hint = f"train on the first of its {len(done)} replies: --replies N"
        held = nullcontext() if rows is None else rows.lock()
        with (
            _lock_file(file, hint),
            held,
            TextIOWrapper(_open_for_append(file), encoding="utf-8") as log,
        ):
            log.truncate(_count_complete_bytes(file))
            done, decoder = _read_replies(file), target()
            first = sum(reply.size for reply in done.values() if reply.answer)
            if rows is not None:
                rows.complete(
                    load_replies(file), partial(_read_rows, decoder, rows.captured_layers)
                )
                rows.truncate(first)
            lacking = [(number, ask) for number, ask in enumerate(prompts) if number not in done]
            captured_layers = None if rows is None else rows.captured_layers
            for number, reply, kept in _generate_replies(
                decoder, lacking, ends, seed, captured_layers
            ):
                done[number] = reply._replace(first_row=first)
                if reply.answer:
                    first += reply.size
                    if rows is not None and kept is not None:
                        rows.append(kept)
                row = {"chat": number, "prompt": reply.prompt, "answer": reply.answer}
                log.write(json.dumps(row) + "\n")
                log.flush()
                progress(len(done))
    return {number: done[number] for number in range(len(prompts)) if done[number].answer}


def load_replies(file: Path) -> list[TrainingReply]:
    """The replies with an answer that a file holds, in its order."""
    return [reply for reply in _read_replies(file).values() if reply.answer]


class Replies(PackedChats):
    """Replies over and over, in a fixed order; made when the first one is needed."""

    def __init__(self, padding: int, make: Callable[[], Sequence[EncodedChat]]) -> None:
        super().__init__(padding)
        self._make = make
        self._replies: Sequence[EncodedChat] | None = None
        self._drawn = 0

    def draw(self) -> EncodedChat:
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

    def get_position(self) -> dict[str, Any]:
        """How many were drawn."""
        return {"drawn": self._drawn}

    def seek(self, place: dict[str, Any]) -> None:
        """Continue after as many."""
        self._drawn = place["drawn"]


@dataclass(slots=True)
class _GrowingReply:
    """A reply in the making. fed: what its next forward reads; said: tokens of the answer, or of
    the question while that is being asked; place: its own among the lines."""

    number: int
    prompt_request: ReplyPrompt
    slot: int
    state: State
    rng: random.Random
    input_ids: list[int]
    prompt: list[int]
    in_question: bool
    tokens: list[int] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        """Whether the next token is drawn."""
        return self.in_question or not self.prompt_request.greedy

    def add_token(self, token: int, ends: Collection[int]) -> TrainingReply | None:
        """Go on with a token; the reply, once it is whole or nothing will come of it."""
        room = MAX_LENGTH - len(self.prompt) - len(self.tokens) - 1
        if not self.in_question:
            self.tokens.append(token)
            self.input_ids = [token]
            whole = token in ends or len(self.tokens) >= MAX_ANSWER or not room
            return TrainingReply(self.prompt, self.tokens) if whole else None
        if token == self.prompt_request.question_end[0]:
            self.prompt += [*self.tokens, *self.prompt_request.question_end]
            self.input_ids = list(self.prompt_request.question_end)
            short = len(self.tokens) < MIN_QUESTION
            self.tokens, self.in_question = [], False
            return TrainingReply(self.prompt, []) if short else None
        self.tokens.append(token)
        self.input_ids = [token]
        fails = token in ends or len(self.tokens) > MAX_QUESTION
        return TrainingReply([*self.prompt, *self.tokens], []) if fails else None


@torch.inference_mode()
def _generate_replies(
    target: Decoder,
    asks: Sequence[tuple[int, ReplyPrompt]],
    ends: Collection[int],
    seed: int,
    captured_layers: tuple[int, ...] | None = None,
) -> Iterator[tuple[int, TrainingReply, TargetRows | None]]:
    """Yield each reply as soon as it is complete; the next prompt takes its slot.

    With `captured_layers`, also yield the target's rows over the reply. The row of the last token
    is 0, because the target did not read it."""
    states = _new_states(target, captured_layers, len(asks))
    free = list(range(len(states)))
    begin, shared, first = _run_shared_prefix(target, [ask for _, ask in asks], captured_layers)
    held = None if captured_layers is None else _RowBuffer(target, captured_layers, len(states))
    waiting, live = iter(asks), dict[int, _GrowingReply]()
    while True:
        while free and (following := next(waiting, None)) is not None:
            number, ask = following
            if len(ask.ids) > MAX_LENGTH // 2:
                yield number, TrainingReply(list(ask.ids), []), None
                continue
            place = heappop(free)
            state, chance = states[place], random.Random(f"reply/{seed}/{number}")
            state.clear()
            if begin is not None and isinstance(state, KVState):
                for mine, read in zip(state.buffers, begin.buffers, strict=True):
                    mine[..., :shared, :].copy_(read[..., :shared, :])
                state.extend(0, range(target.n_layers), shared)
                state.commit(0, range(shared))
            if held is not None and first is not None:
                held.start_sequence(place, first)
            ids = list(ask.ids)
            live[number] = _GrowingReply(
                number, ask, place, state, chance, ids[shared:], ids, bool(ask.question_end)
            )
        if not live:
            return
        # Neighbours in memory with as many rows each are attended to at once.
        lines = sorted(live.values(), key=lambda line: (len(line.input_ids), line.slot))
        ns = [len(line.input_ids) for line in lines]
        starts = [line.state.position() for line in lines]
        fed = host.ids(list(chain.from_iterable(line.input_ids for line in lines)), target.device)
        parts = [
            ModelInput(Tokens(ids), line.state)
            for ids, line in zip(fed[None].split(ns, 1), lines, strict=True)
        ]
        outs = target.forward_batch(parts, captured_layers=captured_layers or ())
        logits = torch.cat([out.logits for out in outs if out.logits is not None], 1)[0]
        best = logits.argmax(-1)
        if held is not None:
            held.write([line.slot for line in lines], starts, ns, outs, best)
        tokens = _choose_tokens(logits, best, lines)
        for line, n, token in zip(lines, ns, tokens, strict=True):
            line.state.commit(0, range(n))
            reply = line.add_token(token, ends)
            if reply is not None:
                heappush(free, live.pop(line.number).slot)
                whole = (
                    held.read_reply(line.slot, reply) if reply.answer and held is not None else None
                )
                yield line.number, reply, whole


class _RowBuffer:
    """The target's rows over the sequences in the making, each at its place: written for all of
    them at once, and read of one when it is whole.

    Args:
        lines: how many places there are.
    """

    def __init__(self, target: Decoder, captured_layers: tuple[int, ...], lines: int) -> None:
        self._target, self._captured_layers = target, captured_layers
        size, device = (lines, MAX_LENGTH), target.device
        width = _get_row_width(target, captured_layers)
        self._rows = torch.zeros(*size, width, dtype=torch.half, device=device)
        self._best = torch.zeros(size, dtype=torch.int64, device=device)

    def start_sequence(self, place: int, read: TargetRows) -> None:
        """A sequence begins with rows that all have."""
        self._rows[place, : len(read.rows)] = read.rows
        self._best[place, : len(read.best)] = read.best

    def write(
        self,
        places: Sequence[int],
        starts: Sequence[int],
        ns: Sequence[int],
        outs: Sequence[ModelOutput],
        last: Tensor,
    ) -> None:
        """The rows of a forward: ns[i] of the sequence at places[i], from starts[i] on.

        Args:
            last: [sequences], what each one's last row says.
        """
        device, captured_layers = self._target.device, self._captured_layers
        hidden = torch.cat([out.hidden for out in outs], 1)
        aux_hidden_states = {
            at: torch.cat([out.aux_hidden_states[at] for out in outs], 1) for at in captured_layers
        }
        ends = [end - 1 for end in accumulate(ns)]
        new = _compute_rows(
            self._target, captured_layers, ModelOutput(None, hidden, aux_hidden_states), ends, last
        )
        owners = chain.from_iterable(map(repeat, places, ns))
        spans = (range(start, start + n) for start, n in zip(starts, ns, strict=True))
        where = [list(owners), list(chain.from_iterable(spans))]
        at = tuple(host.ids(where, device).unbind())
        self._rows.index_put_(at, new.rows)
        self._best.index_put_(at, new.best)

    def read_reply(self, place: int, reply: TrainingReply) -> TargetRows:
        """Those of a whole reply; nothing of its last token, which was not fed."""
        rows, best = self._rows[place, : reply.size], self._best[place, : reply.size]
        rows[-1], best[-1] = 0, best[0]
        return TargetRows(rows, best)


def _get_row_width(target: Decoder, captured_layers: tuple[int, ...]) -> int:
    """Numbers that are kept of a token."""
    return (len(captured_layers) + 1) * target.hidden_size


def _compute_rows(
    target: Decoder,
    captured_layers: tuple[int, ...],
    out: ModelOutput,
    known: Sequence[int] = (),
    says: Tensor | None = None,
) -> TargetRows:
    """What is kept of a forward's rows [1, n, hidden].

    Args:
        known: rows of which it is known what they say, rising; says: [rows], that.
    """
    normed = target.norm(out.hidden[0])
    rows = torch.cat([*(out.aux_hidden_states[at][0] for at in captured_layers), normed], -1).half()
    if says is not None and len(known) == len(normed):
        return TargetRows(rows, says)
    asked = sorted(set(range(len(normed))).difference(known))
    order = host.ids([*asked, *known], target.device)
    blocks = normed.index_select(0, order[: len(asked)]).split(LOGITS_BLOCK_ROWS)
    found = [target.unembed(block).argmax(-1) for block in blocks]
    best = torch.cat(found if says is None else [*found, says])
    return TargetRows(rows, torch.empty_like(best).index_copy_(0, order, best))


@torch.inference_mode()
def _read_rows(target: Decoder, captured_layers: tuple[int, ...], ids: Sequence[int]) -> TargetRows:
    """The rows over a text that is there."""
    read = Tokens(host.ids([ids], target.device))
    state = target.new_state(len(ids))
    return _compute_rows(
        target,
        captured_layers,
        target.forward(read, state, logits_at=None, captured_layers=captured_layers),
    )


def _choose_batch_size(target: Decoder, captured_layers: tuple[int, ...] | None) -> int:
    """How many sequences are decoded together; what each is given does not depend on it."""
    if host.is_on_host(target.device):
        return BATCH_SIZE
    bytes_each = target.new_state(MAX_LENGTH).nbytes
    if captured_layers is not None:
        bytes_each += MAX_LENGTH * (2 * _get_row_width(target, captured_layers) + 8)
    free, _ = torch.cuda.mem_get_info(target.device)
    return max(1, min(DEVICE_BATCH_SIZE, int(MEMORY_SHARE * free) // max(1, bytes_each)))


def _new_states(target: Decoder, captured_layers: tuple[int, ...] | None, most: int) -> list[State]:
    """Room for `_at_once` sequences, or for the `most` that there are, in one piece of memory where
    a decoder's states can."""
    lines = min(_choose_batch_size(target, captured_layers), most)
    pool = target.new_state(MAX_LENGTH, lines)
    if isinstance(pool, KVState):
        return [pool.sequence_state(place) for place in range(lines)]
    return [target.new_state(MAX_LENGTH) for _ in range(lines)]


def _run_shared_prefix(
    target: Decoder, asks: Sequence[ReplyPrompt], captured_layers: tuple[int, ...] | None
) -> tuple[KVState | None, int, TargetRows | None]:
    """What all asks begin with (a template's system prompt), read once; how many rows, and what is
    kept of them."""
    places = zip(*(ask.ids[:-1] for ask in asks), strict=False)
    shared = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, places))
    state = target.new_state(max(1, shared))
    if not shared or not isinstance(state, KVState):
        return None, 0, None
    ids = host.ids([asks[0].ids[:shared]], target.device)
    out = target.forward(Tokens(ids), state, logits_at=None, captured_layers=captured_layers or ())
    return (
        state,
        shared,
        None if captured_layers is None else _compute_rows(target, captured_layers, out),
    )


def _choose_tokens(logits: Tensor, best: Tensor, lines: Sequence[_GrowingReply]) -> list[int]:
    """A token a line from logits [lines, V]: the likeliest, or drawn by inverting the sums."""
    drawn = [at for at, line in enumerate(lines) if line.is_sampled]
    if not drawn:
        likeliest: list[int] = host.numbers(best)
        return likeliest
    device = logits.device
    picked = logits.index_select(0, host.ids(drawn, device))
    sums = picked.float().softmax(-1).cumsum(-1)
    chances = host.send(torch.tensor([[lines[at].rng.random()] for at in drawn]), device)
    found = torch.searchsorted(sums, chances * sums[:, -1:], right=True)
    chosen, said = host.lists(best, found[:, 0])
    for at, token in zip(drawn, said, strict=True):
        chosen[at] = min(token, logits.shape[-1] - 1)
    return chosen


def _count_complete_bytes(file: Path) -> int:
    """Bytes of the whole lines; a run that was killed may leave half a line more."""
    return file.read_bytes().rfind(b"\n") + 1 if file.is_file() else 0


def _read_replies(file: Path) -> dict[int, TrainingReply]:
    """The whole lines of the file."""
    lines = file.read_bytes()[: _count_complete_bytes(file)].splitlines() if file.is_file() else []
    rows: Iterator[Mapping[str, Any]] = map(json.loads, lines)
    done, first = dict[int, TrainingReply](), 0
    for row in rows:
        reply = done[row["chat"]] = TrainingReply(row["prompt"], row["answer"], first)
        first += reply.size if reply.answer else 0
    return done


def _open_for_append(file: Path) -> BufferedWriter:
    """Open a file of the training for appending. Raise UsageError if it is a link."""
    return os.fdopen(files.open_own(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")


@contextmanager
def _lock_file(file: Path, hint: str) -> Iterator[None]:
    """Keeps other processes from writing a file; raises UsageError where one does."""
    lock = Path(f"{file}.lock")
    files.check_own(lock, lambda content: not content)
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout:
        raise UsageError(
            f"another process is writing {file.name} in {file.parent}", f"wait for it, or {hint}"
        ) from None
