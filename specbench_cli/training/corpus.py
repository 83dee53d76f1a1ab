"""Training corpus of the embedded models, which are the small models that specbench ships.

The corpus is an endless stream of chats with a random seed. About 90% of the tokens are synthetic
questions and answers of six task families. 10% are from GSM8K's training split. GSM8K's test split
is not used, because it overlaps Spec-Bench. Calculator annotations such as `<<48/2=24>>` are
removed; the final `#### N` is kept.
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
"""Special tokens of the embedded family's chat format."""
GSM8K_FILE = "gsm8k_train.jsonl"
GSM8K_SHA256 = "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"
GSM8K_SHARE = 0.1
PROMPT_LOSS_WEIGHT = 0.1
"""Loss weight of prompt tokens. Answers have the weight 1."""
CALCULATOR = re.compile(r"<<[^>]*>>")

Chat = list[tuple[str, str]]


def load_gsm8k(data: Path | None = None) -> list[Chat]:
    """Return GSM8K's 7,473 training problems as chats with one turn.

    The problems are read from `gsm8k_train.jsonl` in `data` or in $SPECBENCH_DATA. Without such a
    file, they are downloaded.

    Raises:
        EnvironmentFault: there is no such file, and the download fails.
        UsageError: the file has another checksum.
    """
    path = Path(data or os.environ.get("SPECBENCH_DATA", "")) / GSM8K_FILE
    if path.is_file():
        raw = path.read_bytes()
        if hashlib.sha256(raw).hexdigest() != GSM8K_SHA256:
            raise UsageError(
                f"{path} is not the GSM8K training file: its sha256 is not {GSM8K_SHA256}",
                "replace it by the original file, or remove it to download the data",
            )
        rows: Sequence[dict[str, str]] = [json.loads(line) for line in raw.splitlines()]
    else:
        rows = _download_gsm8k()
    return [[(row["question"], CALCULATOR.sub("", row["answer"]))] for row in rows]


def _download_gsm8k() -> Sequence[dict[str, str]]:
    from datasets import load_dataset

    try:
        rows: Sequence[dict[str, str]] = list(load_dataset("openai/gsm8k", "main", split="train"))
    except Exception as fault:  # network, hub and cache fail with many unrelated types
        raise EnvironmentFault(
            "training needs GSM8K's training split, and it could not be downloaded",
            f"set SPECBENCH_DATA (or --data) to a folder with {GSM8K_FILE}",
        ) from fault
    return rows


def generate_chats(seed: int) -> Iterator[Chat]:
    """Return an endless iterator of generated training chats."""
    return map(make_chat, generated.generate_rows(seed, "train"))


def make_chat(row: generated.GeneratedConversation) -> Chat:
    """Return a generated conversation as pairs of (question, answer)."""
    return list(zip(row["turns"], row["reference"], strict=True))


def choose_reply_chats(gsm8k: Sequence[Chat], seed: int, n: int) -> list[Chat]:
    """Return `n` chats whose questions the target will answer.

    One in ten is a GSM8K problem, as in the corpus. The others are generated.
    """
    generated = generate_chats(seed)
    problems = cycle(gsm8k)
    every = round(1 / GSM8K_SHARE)
    return [
        next(problems) if gsm8k and index % every == 0 else next(generated) for index in range(n)
    ]


class Encoder:
    """Encoder of chats for the embedded models, which specbench ships.

    Each token gets a loss weight.

    Attributes:
        ends: tokens that end an answer.
        padding: id of the padding token.
        vocabulary: map from token to token id.

    Raises:
        UsageError: the tokenizer does not belong to an embedded model.
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
        """Return the token ids of a plain text."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, question: str) -> list[int]:
        """Return the token ids of a prompt with this question.

        The prompt ends where the answer begins.
        """
        return [self._begin, self._user, *self.encode_text(question), self._assistant]

    def __call__(self, chat: Chat) -> EncodedChat:
        """Return the encoded chat."""
        ids, weights = [self._begin], [PROMPT_LOSS_WEIGHT]
        for question, answer in chat:
            prompt, reply = self.encode_text(question), self.encode_text(answer)
            ids += [self._user, *prompt, self._assistant, *reply, self.end]
            weights += [PROMPT_LOSS_WEIGHT] * (len(prompt) + 2) + [1.0] * (len(reply) + 1)
        return EncodedChat(ids, weights)


class TemplateEncoder:
    """Encoder of prompts with the tokenizer's chat template.

    Args:
        tokenizer: a tokenizer with a chat template.
        ends: token ids that end an answer.

    Attributes:
        padding: token id to fill sequences with.
        question_prefix: token ids of a prompt before the user's question. A model continues them
            with a question of its own (Magpie).
        answer_prefix: token ids between the question and the answer. Empty if the first of them is
            no special token, because then the end of a generated question cannot be found.

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
                "the target's tokenizer has no chat template that contains the user's question",
                "choose a --target with a chat template: specbench list models",
            )
        pad = tokenizer.pad_token_id
        self.padding: int = min(ends) if pad is None else pad
        self.question_prefix, prefix = self.encode_text(before), self.encode_text(after)
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self.answer_prefix = prefix if prefix and prefix[0] in special else []

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text that the template has formatted."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_prompt(self, question: str) -> list[int]:
        """Return the token ids of a prompt with this question.

        The prompt ends where the answer begins.
        """
        return self.encode_text(self._render(question))

    def _render(self, question: str) -> str:
        return apply_template(self._tokenizer, [("user", question)], "the target")


@dataclass
class Cursor:
    """Position in the corpus: number of generated conversations and GSM8K problems so far, and
    their tokens.
    """

    rows: int = 0
    problems: int = 0
    row_tokens: int = 0
    problem_tokens: int = 0


class Corpus(PackedChats):
    """Corpus of generated conversations (rows) and GSM8K problems, mixed by number of tokens.

    Args:
        encode: encoder with the tokenizer of the trained model.
        gsm8k: training problems, read in a new seeded order in each epoch. May be empty.
        seed: seed of the generated rows and of the order of the problems.
        families: task families of the generated rows, used in turn. A family may occur several
            times.
        split: split of the generated rows.
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
        """Return the position in the corpus as JSON."""
        return asdict(self._cursor)

    def seek(self, position: dict[str, Any]) -> None:
        """Continue at a position that an earlier call of `get_position` returned."""
        self._cursor = Cursor(**position)

    def draw(self) -> EncodedChat:
        """Return the next chat.

        It is a GSM8K problem if such problems have less than their share of tokens so far.
        Otherwise it is generated.
        """
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
        """Return generated conversation number `index`. The task families are used in turn."""
        rounds, place = divmod(index, len(self._families))
        family = self._families[place]
        in_family = rounds * self._families.count(family) + self._families[:place].count(family)
        all_families = generated.FAMILIES
        return generated.generate_row(
            self._seed, self._split, in_family * len(all_families) + all_families.index(family)
        )

    def _problem(self, index: int) -> Chat:
        epoch, place = divmod(index, len(self._gsm8k))
        if self._order[0] != epoch:
            order = list(range(len(self._gsm8k)))
            random.Random(f"gsm8k/{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._gsm8k[self._order[1][place]]
