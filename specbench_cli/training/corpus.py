"""What the embedded family reads: an endless seeded stream of chats.

About 90% of the tokens come from the six generated families, 10% from GSM8K's training split (never
its test split, which overlaps Spec-Bench). Calculator annotations `<<48/2=24>>` are stripped, the
final `#### N` is kept.
"""

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.tasks.template import apply_template
from specbench_cli.training import generated
from specbench_cli.training.packing import EncodedChat, PackedChats

END, USER, ASSISTANT, BEGIN, PAD = SPECIAL_TOKENS = (
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|begin|>",
    "<|pad|>",
)
"""Tokens that frame a conversation of the embedded family; `recipes.embedded` trains the rest."""
GSM8K_FILE = "gsm8k_train.jsonl"
GSM8K_SHA256 = "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"
GSM8K_SHARE = 0.1
PROMPT_LOSS_WEIGHT = (
    0.1  # prompts teach language too, but it is answers that the model is asked for
)
CALCULATOR = re.compile(r"<<[^>]*>>")

Chat = list[tuple[str, str]]


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


def generate_chats(seed: int) -> Iterator[Chat]:
    """The endless generated training rows as chats."""
    return map(make_chat, generated.generate_rows(seed, "train"))


def make_chat(row: generated.GeneratedConversation) -> Chat:
    """A generated row's questions with their answers."""
    return list(zip(row["turns"], row["reference"], strict=True))


def choose_reply_chats(gsm8k: Sequence[Chat], seed: int, n: int) -> list[Chat]:
    """`n` chats whose questions a target is to answer, mixed by number about as the corpus is."""
    generated = generate_chats(seed)
    problems = cycle(gsm8k)
    every = round(1 / GSM8K_SHARE)
    return [
        next(problems) if gsm8k and index % every == 0 else next(generated) for index in range(n)
    ]


class Encoder:
    """Encoder of chats with the family's template, with loss weights for questions and answers.

    Raises:
        UsageError: the tokenizer is not the embedded family's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        if missing := set(SPECIAL_TOKENS) - vocabulary.keys():
            raise UsageError(
                "this model's tokenizer is not the embedded family's: it has no token"
                f" {', '.join(sorted(missing))}",
                "--target embedded-7m",
            )
        self._bpe = tokenizer.backend_tokenizer
        self._begin, self._user, self._assistant, self.end = (
            vocabulary[token] for token in (BEGIN, USER, ASSISTANT, END)
        )
        self.ends = frozenset({self.end})
        self.padding = vocabulary[PAD]
        self.vocabulary = vocabulary

    def encode_text(self, text: str) -> list[int]:
        """The ids of plain text."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, question: str) -> list[int]:
        """The ids of a first question, up to where its answer begins."""
        return [self._begin, self._user, *self.encode_text(question), self._assistant]

    def __call__(self, chat: Chat) -> EncodedChat:
        """The whole chat."""
        ids, weights = [self._begin], [PROMPT_LOSS_WEIGHT]
        for question, answer in chat:
            asked, said = self.encode_text(question), self.encode_text(answer)
            ids += [self._user, *asked, self._assistant, *said, self.end]
            weights += [PROMPT_LOSS_WEIGHT] * (len(asked) + 2) + [1.0] * (len(said) + 1)
        return EncodedChat(ids, weights)


class TemplateEncoder:
    """Prompts to token ids by a tokenizer's own chat template.

    Args:
        tokenizer: with a chat template.
        ends: tokens that end an answer.

    Attributes:
        padding: an id to fill sequences with.
        asks: ids of a prompt up to where the user's question begins.
        answers: ids from its end to where the answer begins, if a token that is no text ends it;
            else none, and a model cannot be asked for a question.

    Raises:
        UsageError: the tokenizer has no template, or the template fails or omits the question.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, ends: frozenset[int]) -> None:
        self._tokenizer, self.ends = tokenizer, ends
        mark = "a question"
        text = self._render(mark) if tokenizer.chat_template else ""
        before, found, after = text.rpartition(mark)
        if not found:
            raise UsageError(
                "replies need a chat template that holds the user's question; this tokenizer's does"
                " not",
                "give a --target that answers chats: specbench list models",
            )
        pad = tokenizer.pad_token_id
        self.padding: int = min(ends) if pad is None else pad
        self.question_prefix, answer_prefix = self.encode_text(before), self.encode_text(after)
        said = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self.answers = answer_prefix if answer_prefix and answer_prefix[0] in said else []

    def encode_text(self, text: str) -> list[int]:
        """The ids of text that the template wrote."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_prompt(self, question: str) -> list[int]:
        """The ids of a first question, up to where its answer begins."""
        return self.encode_text(self._render(question))

    def _render(self, question: str) -> str:
        return apply_template(self._tokenizer, [("user", question)], "the target")


@dataclass
class Cursor:
    """Where in the stream the next chat is; together with the seed it fixes all that follows."""

    rows: int = 0
    problems: int = 0
    row_tokens: int = 0
    problem_tokens: int = 0


class Corpus(PackedChats):
    """The generated rows and GSM8K's problems, mixed by tokens.

    Args:
        encode: for the tokenizer of the model to train.
        gsm8k: training problems, read in a new seeded order each epoch; may be empty.
        seed: of the generated rows and of the order of the problems.
        families: whose turn it is, over and over; one that is named twice is read twice as much.
        split: of the generated rows.
    """

    def __init__(
        self,
        encode: Encoder,
        gsm8k: Sequence[Chat],
        seed: int,
        families: Sequence[str] = generated.FAMILIES,
        split: generated.Split = "train",
    ) -> None:
        super().__init__(encode.padding)
        self._families = families
        self._split: generated.Split = split
        self._encode = encode
        self._gsm8k = gsm8k
        self._seed = seed
        self._cursor = Cursor()
        self._order: tuple[int, list[int]] = (-1, [])

    def get_position(self) -> dict[str, Any]:
        """The cursor as JSON."""
        return asdict(self._cursor)

    def seek(self, place: dict[str, Any]) -> None:
        """Continue at the cursor that `place` gave."""
        self._cursor = Cursor(**place)

    def draw(self) -> EncodedChat:
        """A row of a family, or a problem while those are fewer than their share."""
        at = self._cursor
        due = GSM8K_SHARE * (at.row_tokens + at.problem_tokens)
        if self._gsm8k and at.problem_tokens <= due:
            encoded = self._encode(self._problem(at.problems))
            at.problems += 1
            at.problem_tokens += len(encoded.ids)
        else:
            encoded = self._encode(make_chat(self._row(at.rows)))
            at.rows += 1
            at.row_tokens += len(encoded.ids)
        return encoded

    def _row(self, index: int) -> generated.GeneratedConversation:
        """Row `index` of this mixture: the next one of the family whose turn it is."""
        rounds, place = divmod(index, len(self._families))
        family = self._families[place]
        own = rounds * self._families.count(family) + self._families[:place].count(family)
        known = generated.FAMILIES
        return generated.generate_row(
            self._seed, self._split, own * len(known) + known.index(family)
        )

    def _problem(self, index: int) -> Chat:
        epoch, place = divmod(index, len(self._gsm8k))
        if self._order[0] != epoch:
            order = list(range(len(self._gsm8k)))
            random.Random(f"gsm8k/{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._gsm8k[self._order[1][place]]
