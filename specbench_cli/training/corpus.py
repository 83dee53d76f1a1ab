"""What the embedded family reads: an endless seeded token stream of chats, packed without padding.

About 70% of the tokens come from the six generated families, 30% from GSM8K's training split (never
its test split, which overlaps Spec-Bench). Calculator annotations `<<48/2=24>>` are stripped, the
final `#### N` is kept.
"""

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.tasks import generate
from specbench_cli.training.tokenizer import ASSISTANT, BEGIN, END, USER

GSM8K_FILE = "gsm8k_train.jsonl"
GSM8K_SHA256 = "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"
GSM8K_SHARE = 0.3
PROMPT_WEIGHT = 0.3  # prompts teach language too, but it is answers that the model is asked for
CALCULATOR = re.compile(r"<<[^>]*>>")

Chat = list[tuple[str, str]]


class Batch(NamedTuple):
    """Token ids `inputs` and `targets`, and the targets' `weights`, each [sequences, length]."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor


def load_gsm8k(data: Path | None = None) -> list[Chat]:
    """GSM8K's 7,473 training problems as one-turn chats.

    Read from `gsm8k_train.jsonl` in `data` or in $SPECBENCH_DATA, else through `datasets`.
    Raises EnvironmentFault where neither is at hand, UsageError where the file is another one.
    """
    path = Path(data or os.environ.get("SPECBENCH_DATA", "")) / GSM8K_FILE
    if path.is_file():
        raw = path.read_bytes()
        if hashlib.sha256(raw).hexdigest() != GSM8K_SHA256:
            raise UsageError(
                f"{path} is not the GSM8K training file this recipe was written for",
                f"expected sha256 {GSM8K_SHA256}",
            )
        rows: Sequence[dict[str, str]] = [json.loads(line) for line in raw.splitlines()]
    else:
        rows = _download_gsm8k()
    return [[(row["question"], CALCULATOR.sub("", row["answer"]))] for row in rows]


def _download_gsm8k() -> Sequence[dict[str, str]]:
    from datasets import load_dataset

    try:
        rows: Sequence[dict[str, str]] = list(load_dataset("openai/gsm8k", "main", split="train"))
    except Exception as fault:  # offline, the Hub and its cache fail in many ways
        raise EnvironmentFault(
            "GSM8K's training split is needed for training and could not be downloaded",
            f"set SPECBENCH_DATA (or --data) to a folder with {GSM8K_FILE}",
        ) from fault
    return rows


def generated_chats(seed: int) -> Iterator[Chat]:
    """The endless generated training rows as chats."""
    for row in generate.stream(seed, "train"):
        yield list(zip(row["turns"], row["reference"], strict=True))


def tokenizer_texts(gsm8k: Sequence[Chat], seed: int, n_generated: int = 24_000) -> Iterator[str]:
    """Plain texts that the merges are learnt from, about the corpus's own mixture."""
    for chat in [*islice(generated_chats(seed), n_generated), *gsm8k]:
        for question, answer in chat:
            yield question
            yield answer


@dataclass
class Cursor:
    """Where in the stream the next batch starts; together with the seed it fixes all that follows.

    `pending` are tokens already drawn and not yet handed out, `pending_weights` their weights.
    """

    rows: int = 0
    problems: int = 0
    row_tokens: int = 0
    problem_tokens: int = 0
    pending: list[int] = field(default_factory=list)
    pending_weights: list[float] = field(default_factory=list)


class Corpus:
    """The stream, cut into batches; `state` and `restore` continue it exactly.

    Args:
        tokenizer: the family's own.
        gsm8k: training problems, read in a new seeded order each epoch; may be empty.
        seed: of the generated rows and of the order of the problems.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, gsm8k: Sequence[Chat], seed: int
    ) -> None:
        self._bpe = tokenizer.backend_tokenizer
        self._id: dict[str, int] = tokenizer.get_vocab()
        self._gsm8k = gsm8k
        self._seed = seed
        self._cursor = Cursor()
        self._order: tuple[int, list[int]] = (-1, [])

    def batch(self, sequences: int, length: int) -> Batch:
        """The next `sequences` x `length` tokens; the target of each is the one that follows."""
        at, need = self._cursor, sequences * length
        while len(at.pending) <= need:
            self._draw()
        ids = torch.tensor(at.pending[: need + 1])
        weights = torch.tensor(at.pending_weights[1 : need + 1])
        del at.pending[:need], at.pending_weights[:need]
        shape = (sequences, length)
        return Batch(ids[:-1].view(shape), ids[1:].view(shape), weights.view(shape))

    def state(self) -> dict[str, Any]:
        """The cursor as JSON."""
        return asdict(self._cursor)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._cursor = Cursor(**state)

    def _draw(self) -> None:
        at = self._cursor
        due = GSM8K_SHARE * (at.row_tokens + at.problem_tokens)
        if self._gsm8k and at.problem_tokens <= due:
            at.problem_tokens += self._append(self._problem(at.problems))
            at.problems += 1
        else:
            row = generate.row(self._seed, "train", at.rows)
            at.row_tokens += self._append(list(zip(row["turns"], row["reference"], strict=True)))
            at.rows += 1

    def _problem(self, index: int) -> Chat:
        epoch, place = divmod(index, len(self._gsm8k))
        if self._order[0] != epoch:
            order = list(range(len(self._gsm8k)))
            random.Random(f"gsm8k/{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._gsm8k[self._order[1][place]]

    def _append(self, chat: Chat) -> int:
        """Add one chat to the pending tokens; how many tokens it has."""
        ids, weights = [self._id[BEGIN]], [PROMPT_WEIGHT]
        for question, answer in chat:
            asked = self._bpe.encode(question, add_special_tokens=False).ids
            said = self._bpe.encode(answer, add_special_tokens=False).ids
            ids += [self._id[USER], *asked, self._id[ASSISTANT], *said, self._id[END]]
            weights += [PROMPT_WEIGHT] * (len(asked) + 2) + [1.0] * (len(said) + 1)
        self._cursor.pending += ids
        self._cursor.pending_weights += weights
        return len(ids)
