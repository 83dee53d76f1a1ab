"""Replies: the target's own answers to training questions, from which draft models and heads learn.

Answers are greedy or sampled at temperature 1, as in DistillSpec (Zhou et al., ICLR 2024,
arXiv:2310.08461), which trains on samples of the models. The target can also generate the question.
It then continues a prompt that ends where the user's turn begins (Magpie, Xu et al.,
arXiv:2406.08464). Replies are stored as JSON Lines, so that an interrupted run can resume.
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
"""Maximum number of sequences that are decoded together on a CPU."""

DEVICE_BATCH_SIZE = 384
"""Maximum number on an accelerator, where a forward takes about as long for any smaller number."""

MEMORY_SHARE = 0.5
"""Maximum share of an accelerator's free memory that these sequences may use."""

LOGITS_BLOCK_ROWS = 512
"""Number of rows whose logits over a whole vocabulary are computed at a time."""

MAX_ANSWER = 256
MAX_QUESTION = 160
MIN_QUESTION = 4
MAX_LENGTH = 512
"""Maximum length in tokens of a question with its answer, which is that of a packed sequence."""


class ReplyPrompt(NamedTuple):
    """Prompt that the target continues.

    Attributes:
        ids: token ids of the prompt. If `question_end` is not empty, the prompt ends before the
            question.
        question_end: tokens between a question and its answer. If not empty, the target generates
            the question, which ends with the first of these tokens. The other tokens are then
            appended.
        greedy: whether the answer is greedy. Generated questions are always sampled.
    """

    ids: Sequence[int]
    question_end: Sequence[int] = ()
    greedy: bool = False


class TrainingReply(NamedTuple):
    """Reply of the target, as token ids.

    Attributes:
        answer: the answer. It ends with an EOS token unless it reached the length limit. Empty if
            the target wrote no answer.
        first_row: row in `HiddenStateFiles` of the first token of the prompt.
    """

    prompt: list[int]
    answer: list[int]
    first_row: int = 0

    @property
    def size(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer)

    def encode(self) -> EncodedChat:
        """Return the reply as an encoded chat, with the loss weight of each token."""
        weights = [PROMPT_LOSS_WEIGHT] * len(self.prompt) + [1.0] * len(self.answer)
        return EncodedChat([*self.prompt, *self.answer], weights, self.first_row)


class TargetRows(NamedTuple):
    """Hidden states and predictions of a target for n tokens.

    Attributes:
        rows: hidden states of the captured layers and hidden states after the final norm,
            concatenated: [n, (layers + 1) * width], fp16.
        best: the target's most likely next token after each token, [n].
    """

    rows: Tensor
    best: Tensor


class HiddenStateFiles:
    """Files with the target's hidden states and predictions over its replies.

    The training of heads reads the files many times. The rows of a reply are appended in the order
    of the JSON lines.

    Args:
        folder: folder of the files.
        captured_layers: target layers whose hidden states are stored. Hidden states after the final
            norm are always stored.
        width: width of the target's hidden states.
    """

    def __init__(self, folder: Path, captured_layers: Sequence[int], width: int) -> None:
        self.captured_layers = tuple(layer for layer in captured_layers if layer != NORMED)
        self.width = (len(self.captured_layers) + 1) * width
        name = "features" + "".join(f"-{layer}" for layer in self.captured_layers)
        self._rows, self._best = folder / f"{name}.f16", folder / f"{name}.best.i32"
        self._is_locked = False

    def __len__(self) -> int:
        """Return the number of tokens whose hidden states and predictions are both stored."""
        rows, best = (f.stat().st_size if f.is_file() else 0 for f in (self._rows, self._best))
        return min(rows // (2 * self.width), best // 4)

    def complete(
        self, replies: Sequence[TrainingReply], read: Callable[[Sequence[int]], TargetRows]
    ) -> None:
        """Append the hidden states of replies that the files do not contain yet.

        Args:
            read: function that computes the hidden states for token ids.

        Raises:
            UsageError: hidden states are missing, and another process is writing them.
        """
        if sum(reply.size for reply in replies) <= len(self):
            return
        with self.lock():
            stored = len(self)
            ends = (reply.first_row + reply.size for reply in replies)
            complete = max((end for end in ends if end <= stored), default=0)
            self.truncate(complete)
            for reply in replies:
                if reply.first_row >= complete:
                    self.append(read([*reply.prompt, *reply.answer]))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the files for writing.

        Raises:
            UsageError: another process has locked the files.
        """
        if self._is_locked:
            yield
            return
        with _lock_file(self._rows, f"train on its first {len(self)} tokens, with fewer --replies"):
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    def truncate(self, tokens: int) -> None:
        """Keep the hidden states of the first `tokens` tokens in both files, and remove the
        rest.
        """
        for file, size in ((self._rows, 2 * self.width), (self._best, 4)):
            with _open_for_append(file) as opened:
                opened.truncate(size * tokens)

    def append(self, new: TargetRows) -> None:
        """Append the hidden states of the next reply."""
        with _open_for_append(self._rows) as rows, _open_for_append(self._best) as best:
            rows.write(new.rows.cpu().numpy().tobytes())
            best.write(new.best.to(torch.int32).cpu().numpy().tobytes())

    def open_arrays(self) -> tuple[NDArray[np.float16], NDArray[np.int32]]:
        """Return the hidden states and the most likely next tokens of all tokens, as memory
        maps.
        """
        n = len(self)
        rows = np.memmap(self._rows, np.float16, "r", shape=(n, self.width))
        return rows, np.memmap(self._best, np.int32, "r", shape=(n,))


def make_prompts(encode: Encoder, chats: Sequence[Chat], greedy: bool = False) -> list[ReplyPrompt]:
    """Return the first question of each chat as a prompt."""
    return [ReplyPrompt(encode.encode_prompt(chat[0][0]), greedy=greedy) for chat in chats]


PROBLEM_INTERVAL = 4
SAMPLED_INTERVAL = 4
"""One prompt in `PROBLEM_INTERVAL` is a GSM8K problem. One answer in `SAMPLED_INTERVAL` is sampled,
the others are greedy."""

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
"""First words of generated questions, for a variety of tasks.

Without them, a small model generates mostly questions of one kind.
"""


def make_magpie_prompts(
    encode: TemplateEncoder, problems: Sequence[Chat], seed: int, n: int
) -> list[ReplyPrompt]:
    """Return `n` prompts for a target of any family: GSM8K problems and self-generated questions.

    Two in three self-generated questions begin with one of `OPENINGS`. With a smaller `n`, the
    result is a prefix of the same list. When all problems are used, they are repeated with sampled
    answers.

    Args:
        problems: GSM8K problems, used in a seeded order. May be empty.

    Raises:
        UsageError: there are no problems, and the target cannot generate questions.
    """
    if not problems and not encode.answer_prefix:
        raise UsageError(
            "with this chat template the target cannot generate questions, and there are no GSM8K"
            " problems",
            f"give GSM8K's problems: --data DIR with {GSM8K_FILE}",
        )
    order = list(range(len(problems)))
    random.Random(f"problems/{seed}").shuffle(order)
    prompts, n_problems = list[ReplyPrompt](), 0
    for number in range(n):
        if problems and (number % PROBLEM_INTERVAL == 0 or not encode.answer_prefix):
            question = problems[order[n_problems % len(order)]][0][0]
            greedy = n_problems < len(order) and n_problems % SAMPLED_INTERVAL > 0
            prompts.append(ReplyPrompt(encode.encode_prompt(question), greedy=greedy))
            n_problems += 1
        else:
            rng = random.Random(f"opening/{seed}/{number}")
            opening = encode.encode_text(rng.choice(OPENINGS)) if number % 2 else []
            greedy = number % (SAMPLED_INTERVAL + 1) > 0
            ids = [*encode.question_prefix, *opening]
            prompts.append(ReplyPrompt(ids, encode.answer_prefix, greedy))
    return prompts


def sample_replies(
    target: Callable[[], Decoder],
    prompts: Sequence[ReplyPrompt],
    ends: Collection[int],
    file: Path,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
    rows: HiddenStateFiles | None = None,
) -> dict[int, TrainingReply]:
    """Return the target's replies. The key is the number of the prompt.

    Replies in `file` are kept. Missing replies are sampled and appended. The random numbers of a
    reply do not depend on the other replies.

    Args:
        target: function that loads the target. It is called only if a reply is missing.
        ends: tokens that end an answer.
        progress: function that is called after each reply with the number of replies so far.
        rows: files for the target's hidden states over the replies.

    Returns:
        The replies with an answer. A prompt has no answer if its generated question does not end in
        time, or if the prompt is too long.
    """
    done = _read_replies(file)
    if len(done.keys() & range(len(prompts))) < len(prompts):
        hint = f"train on its first {len(done)} replies or fewer: --replies N"
        rows_lock = nullcontext() if rows is None else rows.lock()
        with (
            _lock_file(file, hint),
            rows_lock,
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
            missing = [(at, prompt) for at, prompt in enumerate(prompts) if at not in done]
            captured_layers = None if rows is None else rows.captured_layers
            for number, reply, reply_rows in _generate_replies(
                decoder, missing, ends, seed, captured_layers
            ):
                done[number] = reply._replace(first_row=first)
                if reply.answer:
                    first += reply.size
                    if rows is not None and reply_rows is not None:
                        rows.append(reply_rows)
                row = {"chat": number, "prompt": reply.prompt, "answer": reply.answer}
                log.write(json.dumps(row) + "\n")
                log.flush()
                progress(len(done))
    return {number: done[number] for number in range(len(prompts)) if done[number].answer}


def load_replies(file: Path) -> list[TrainingReply]:
    """Return the replies in a file that have an answer, in the order of the file."""
    return [reply for reply in _read_replies(file).values() if reply.answer]


class Replies(PackedChats):
    """Endless stream of the same replies, in a fixed order.

    Args:
        make: function that returns the replies. It is called when the first reply is needed.
    """

    def __init__(self, padding: int, make: Callable[[], Sequence[EncodedChat]]) -> None:
        super().__init__(padding)
        self._make = make
        self._replies: Sequence[EncodedChat] | None = None
        self._drawn = 0

    def draw(self) -> EncodedChat:
        """Return the next reply.

        Raises:
            UsageError: there are no replies.
        """
        if self._replies is None:
            self._replies = self._make()
        if not self._replies:
            raise UsageError(
                "there are no replies to train on: the target answered none of the prompts in time",
                "train the target for longer, or choose another --target",
            )
        self._drawn += 1
        return self._replies[(self._drawn - 1) % len(self._replies)]

    def get_position(self) -> dict[str, Any]:
        """Return the number of replies so far."""
        return {"drawn": self._drawn}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue at a position that an earlier call of `get_position` returned."""
        self._drawn = position["drawn"]


@dataclass(slots=True)
class _GrowingReply:
    """Reply that is being generated.

    Attributes:
        slot: number of the reply's KV cache in the batch.
        input_ids: input of the next forward.
        in_question: whether the target is generating the question.
        tokens: tokens of the question or of the answer so far.
    """

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
        """True if the next token is sampled. False if it is the most likely token."""
        return self.in_question or not self.prompt_request.greedy

    def add_token(self, token: int, ends: Collection[int]) -> TrainingReply | None:
        """Add the target's next token to the reply. Return the reply if it is complete, else None.

        The target may also write the question. If this question is too short or too long, the reply
        ends without an answer.
        """
        room = MAX_LENGTH - len(self.prompt) - len(self.tokens) - 1
        if not self.in_question:
            self.tokens.append(token)
            self.input_ids = [token]
            is_complete = token in ends or len(self.tokens) >= MAX_ANSWER or not room
            return TrainingReply(self.prompt, self.tokens) if is_complete else None
        if token == self.prompt_request.question_end[0]:
            self.prompt += [*self.tokens, *self.prompt_request.question_end]
            self.input_ids = list(self.prompt_request.question_end)
            too_short = len(self.tokens) < MIN_QUESTION
            self.tokens, self.in_question = [], False
            return TrainingReply(self.prompt, []) if too_short else None
        self.tokens.append(token)
        self.input_ids = [token]
        failed = token in ends or len(self.tokens) > MAX_QUESTION
        return TrainingReply([*self.prompt, *self.tokens], []) if failed else None


@torch.inference_mode()
def _generate_replies(
    target: Decoder,
    prompts: Sequence[tuple[int, ReplyPrompt]],
    ends: Collection[int],
    seed: int,
    captured_layers: tuple[int, ...] | None = None,
) -> Iterator[tuple[int, TrainingReply, TargetRows | None]]:
    """Generate several replies together.

    Yield each reply as soon as it is complete. The next prompt then takes its slot.

    With `captured_layers`, also yield the target's hidden states for the reply. They are 0 for the
    last token, because the target did not process it.

    Args:
        prompts: prompts with their numbers.
    """
    states = _new_states(target, captured_layers, len(prompts))
    free = list(range(len(states)))
    prefix_state, n_prefix, prefix_rows = _run_shared_prefix(
        target, [prompt for _, prompt in prompts], captured_layers
    )
    buffer = None if captured_layers is None else _RowBuffer(target, captured_layers, len(states))
    waiting, live = iter(prompts), dict[int, _GrowingReply]()
    while True:
        while free and (following := next(waiting, None)) is not None:
            number, prompt = following
            if len(prompt.ids) > MAX_LENGTH // 2:
                yield number, TrainingReply(list(prompt.ids), []), None
                continue
            slot = heappop(free)
            state, rng = states[slot], random.Random(f"reply/{seed}/{number}")
            state.clear()
            if prefix_state is not None and isinstance(state, KVState):
                for copied, original in zip(state.buffers, prefix_state.buffers, strict=True):
                    copied[..., :n_prefix, :].copy_(original[..., :n_prefix, :])
                state.extend(0, range(target.n_layers), n_prefix)
                state.commit(0, range(n_prefix))
            if buffer is not None and prefix_rows is not None:
                buffer.start_sequence(slot, prefix_rows)
            ids = list(prompt.ids)
            live[number] = _GrowingReply(
                number, prompt, slot, state, rng, ids[n_prefix:], ids, bool(prompt.question_end)
            )
        if not live:
            return
        # Sort by length and slot. The target can then run attention once for neighbouring slots of
        # equal length.
        lines = sorted(live.values(), key=lambda line: (len(line.input_ids), line.slot))
        ns = [len(line.input_ids) for line in lines]
        starts = [line.state.position() for line in lines]
        all_ids = list(chain.from_iterable(line.input_ids for line in lines))
        parts = [
            ModelInput(Tokens(ids), line.state)
            for ids, line in zip(
                host.ids(all_ids, target.device)[None].split(ns, 1), lines, strict=True
            )
        ]
        outs = target.forward_batch(parts, captured_layers=captured_layers or ())
        logits = torch.cat([out.logits for out in outs if out.logits is not None], 1)[0]
        best = logits.argmax(-1)
        if buffer is not None:
            buffer.write([line.slot for line in lines], starts, ns, outs, best)
        tokens = _choose_tokens(logits, best, lines)
        for line, n, token in zip(lines, ns, tokens, strict=True):
            line.state.commit(0, range(n))
            reply = line.add_token(token, ends)
            if reply is not None:
                heappush(free, live.pop(line.number).slot)
                rows = None
                if buffer is not None and reply.answer:
                    rows = buffer.read_reply(line.slot, reply)
                yield line.number, reply, rows


class _RowBuffer:
    """Buffer of the target's hidden states for the replies that are being generated.

    Args:
        n_slots: number of replies in the batch.
    """

    def __init__(self, target: Decoder, captured_layers: tuple[int, ...], n_slots: int) -> None:
        self._target, self._captured_layers = target, captured_layers
        size, device = (n_slots, MAX_LENGTH), target.device
        width = _get_row_width(target, captured_layers)
        self._rows = torch.zeros(*size, width, dtype=torch.half, device=device)
        self._best = torch.zeros(size, dtype=torch.int64, device=device)

    def start_sequence(self, slot: int, prefix: TargetRows) -> None:
        """Start a reply with the hidden states of the prefix that all prompts share."""
        self._rows[slot, : len(prefix.rows)] = prefix.rows
        self._best[slot, : len(prefix.best)] = prefix.best

    def write(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        ns: Sequence[int],
        outs: Sequence[ModelOutput],
        last: Tensor,
    ) -> None:
        """Store the hidden states of a forward: ns[i] rows in slots[i], from position starts[i].

        Args:
            slots: slot of each sequence.
            starts: position of the first new row of each sequence.
            ns: number of new rows of each sequence.
            outs: outputs of the target.
            last: the most likely next token after the last row of each sequence, [sequences].
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
        slot_of_row = chain.from_iterable(map(repeat, slots, ns))
        positions = (range(start, start + n) for start, n in zip(starts, ns, strict=True))
        indices = [list(slot_of_row), list(chain.from_iterable(positions))]
        index = tuple(host.ids(indices, device).unbind())
        self._rows.index_put_(index, new.rows)
        self._best.index_put_(index, new.best)

    def read_reply(self, slot: int, reply: TrainingReply) -> TargetRows:
        """Return the hidden states and predictions for a complete reply.

        The row of the last token is 0, because the target did not process that token.
        """
        rows, best = self._rows[slot, : reply.size], self._best[slot, : reply.size]
        rows[-1], best[-1] = 0, best[0]
        return TargetRows(rows, best)


def _get_row_width(target: Decoder, captured_layers: tuple[int, ...]) -> int:
    """Return the number of hidden state values that are stored per token."""
    return (len(captured_layers) + 1) * target.hidden_size


def _compute_rows(
    target: Decoder,
    captured_layers: tuple[int, ...],
    out: ModelOutput,
    known: Sequence[int] = (),
    known_best: Tensor | None = None,
) -> TargetRows:
    """Return the hidden states and predictions to store, from a forward's output [1, n, width].

    Args:
        known: indices of rows whose most likely next token is already known, in ascending order.
        known_best: most likely next tokens of these rows, [len(known)].
    """
    normed = target.norm(out.hidden[0])
    rows = torch.cat([*(out.aux_hidden_states[at][0] for at in captured_layers), normed], -1).half()
    if known_best is not None and len(known) == len(normed):
        return TargetRows(rows, known_best)
    unknown = sorted(set(range(len(normed))).difference(known))
    order = host.ids([*unknown, *known], target.device)
    blocks = normed.index_select(0, order[: len(unknown)]).split(LOGITS_BLOCK_ROWS)
    found = [target.unembed(block).argmax(-1) for block in blocks]
    best = torch.cat(found if known_best is None else [*found, known_best])
    return TargetRows(rows, torch.empty_like(best).index_copy_(0, order, best))


@torch.inference_mode()
def _read_rows(target: Decoder, captured_layers: tuple[int, ...], ids: Sequence[int]) -> TargetRows:
    """Return the target's hidden states and predictions for a text."""
    tokens = Tokens(host.ids([ids], target.device))
    state = target.new_state(len(ids))
    out = target.forward(tokens, state, logits_at=None, captured_layers=captured_layers)
    return _compute_rows(target, captured_layers, out)


def _choose_batch_size(target: Decoder, captured_layers: tuple[int, ...] | None) -> int:
    """Return the number of replies that are generated together. It does not affect the replies."""
    if host.is_on_host(target.device):
        return BATCH_SIZE
    bytes_each = target.new_state(MAX_LENGTH).nbytes
    if captured_layers is not None:
        bytes_each += MAX_LENGTH * (2 * _get_row_width(target, captured_layers) + 8)
    free, _ = torch.cuda.mem_get_info(target.device)
    return max(1, min(DEVICE_BATCH_SIZE, int(MEMORY_SHARE * free) // max(1, bytes_each)))


def _new_states(target: Decoder, captured_layers: tuple[int, ...] | None, most: int) -> list[State]:
    """Return the KV caches of a batch with at most `most` sequences.

    If the decoder supports it, the KV caches share one allocation.
    """
    lines = min(_choose_batch_size(target, captured_layers), most)
    pool = target.new_state(MAX_LENGTH, lines)
    if isinstance(pool, KVState):
        return [pool.sequence_state(place) for place in range(lines)]
    return [target.new_state(MAX_LENGTH) for _ in range(lines)]


def _run_shared_prefix(
    target: Decoder, prompts: Sequence[ReplyPrompt], captured_layers: tuple[int, ...] | None
) -> tuple[KVState | None, int, TargetRows | None]:
    """Run the target on the tokens that all prompts begin with, such as a system prompt.

    Returns:
        The KV cache, the number of shared tokens, and the target's hidden states for them.
    """
    columns = zip(*(prompt.ids[:-1] for prompt in prompts), strict=False)
    shared = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
    state = target.new_state(max(1, shared))
    if not shared or not isinstance(state, KVState):
        return None, 0, None
    ids = host.ids([prompts[0].ids[:shared]], target.device)
    out = target.forward(Tokens(ids), state, logits_at=None, captured_layers=captured_layers or ())
    rows = None if captured_layers is None else _compute_rows(target, captured_layers, out)
    return state, shared, rows


def _choose_tokens(logits: Tensor, best: Tensor, lines: Sequence[_GrowingReply]) -> list[int]:
    """Return the next token of each reply, greedy or sampled, from logits [replies, vocab].

    A token is sampled by inverting the cumulative distribution.
    """
    sampled = [at for at, line in enumerate(lines) if line.is_sampled]
    if not sampled:
        greedy: list[int] = host.numbers(best)
        return greedy
    device = logits.device
    sampled_logits = logits.index_select(0, host.ids(sampled, device))
    sums = sampled_logits.float().softmax(-1).cumsum(-1)
    uniform = host.send(torch.tensor([[lines[at].rng.random()] for at in sampled]), device)
    found = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    tokens, sampled_tokens = host.lists(best, found[:, 0])
    for at, token in zip(sampled, sampled_tokens, strict=True):
        tokens[at] = min(token, logits.shape[-1] - 1)
    return tokens


def _count_complete_bytes(file: Path) -> int:
    """Return the size in bytes of all complete lines.

    A killed run may leave an incomplete last line.
    """
    return file.read_bytes().rfind(b"\n") + 1 if file.is_file() else 0


def _read_replies(file: Path) -> dict[int, TrainingReply]:
    """Return the replies in the complete lines of a file. The key is the number of the prompt."""
    lines = file.read_bytes()[: _count_complete_bytes(file)].splitlines() if file.is_file() else []
    rows: Iterator[Mapping[str, Any]] = map(json.loads, lines)
    done, first = dict[int, TrainingReply](), 0
    for row in rows:
        reply = done[row["chat"]] = TrainingReply(row["prompt"], row["answer"], first)
        first += reply.size if reply.answer else 0
    return done


def _open_for_append(file: Path) -> BufferedWriter:
    """Open a file for appending.

    Raises:
        UsageError: the file is a link.
    """
    return os.fdopen(files.open_own(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")


@contextmanager
def _lock_file(file: Path, hint: str) -> Iterator[None]:
    """Lock a file for writing.

    Raises:
        UsageError: another process has locked the file.
    """
    lock = Path(f"{file}.lock")
    files.check_own(lock, lambda content: not content)
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout:
        raise UsageError(
            f"another process is writing {file.name} in {file.parent}", f"wait for it, or {hint}"
        ) from None
