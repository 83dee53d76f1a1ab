"""Creation of a datastore for REST, from a target's own replies or from texts of the user."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from methods.rest.datastore import TOKENIZER, Datastore, write
from specbench_cli.engine.models.checkpoint import Weights, read_config, read_tokenizer, text_config
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.errors import UsageError
from specbench_cli.files import staging_folder
from specbench_cli.training.corpus import SPECIAL_TOKENS, Chat, Encoder, choose_reply_chats
from specbench_cli.training.loop import WORK, claim
from specbench_cli.training.replies import make_prompts, sample_replies

BATCH_SIZE = 512
"""Number of texts that are tokenized together."""


@dataclass(frozen=True)
class DatastoreMaker:
    """Builder of a REST datastore for one target.

    Args:
        out: folder in which the folder `datastore` is created. It may contain earlier replies of
            the target.
        target: folder of the target, whose tokenizer is used.
        progress: function that is called with the number of replies or texts so far.
    """

    out: Path
    target: Path
    progress: Callable[[int], None] = lambda _: None

    @property
    def folder(self) -> Path:
        """Folder of the datastore."""
        return self.out / Datastore.kind

    def make_from_replies(
        self, gsm8k: Sequence[Chat], n: int, seed: int, device: torch.device, *, fresh: bool
    ) -> Path:
        """Make a datastore from the target's answers to training questions.

        The target samples the answers at temperature 1. They are stored in the work folder, as in
        the training of a draft head. The last token of the question is stored with each answer.

        Args:
            gsm8k: GSM8K problems among the questions. If empty, all questions are generated.
            n: number of questions.
            fresh: whether to replace an existing datastore.

        Raises:
            UsageError: the target is not a model that specbench ships, or the work folder contains
                replies of another target.
        """
        sha = Weights(self.target).sha256()
        facts: dict[str, Any] = {"from": "replies", "replies": n, "seed": seed}
        facts |= {"problems": len(gsm8k), "target_sha256": sha}
        if self._is_current(facts, fresh):
            return self.folder
        tokenizer = read_tokenizer(self.target)
        if not tokenizer.get_vocab().keys() >= set(SPECIAL_TOKENS):
            raise UsageError(
                f"{self.target.name} is not of the embedded family, and only a target of that"
                " family can generate the replies",
                "give texts for the datastore: --text FILE.txt or FILE.jsonl",
            )
        claim(self.out / WORK, {"target_sha256": sha})
        encode = Encoder(tokenizer)
        chats = choose_reply_chats(gsm8k, seed + 1, n)
        file = self.out / WORK / "replies.jsonl"
        target = partial(load_decoder, self.target, name="target", device=device)
        asks = make_prompts(encode, chats)
        found = sample_replies(target, asks, encode.ends, file, seed, self.progress)
        return self._write([[each.prompt[-1], *each.answer] for each in found.values()], facts)

    def make_from_texts(self, files: Sequence[Path], *, fresh: bool) -> Path:
        """Make a datastore from text files in UTF-8.

        In a `.jsonl` file, the key `text` of each line is one text. Any other file is one text.

        Args:
            fresh: whether to replace an existing datastore.

        Raises:
            UsageError: a file does not exist or is not valid, or all files are empty.
        """
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise UsageError(f"no such file: {missing[0]}", "--text FILE.txt or FILE.jsonl")
        facts = {"from": [{"file": file.name, "sha256": _sha256(file)} for file in files]}
        if self._is_current(facts, fresh):
            return self.folder
        tokenizer = read_tokenizer(self.target)
        found: list[list[int]] = []
        texts = (text for file in files for text in _texts(file))
        while some := list(islice(texts, BATCH_SIZE)):
            found += tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
            self.progress(len(found))
        if not any(found):
            raise UsageError("the files contain no text", "--text FILE.txt or FILE.jsonl")
        return self._write(found, facts)

    def _is_current(self, facts: dict[str, Any], fresh: bool) -> bool:
        """Return True if the folder already contains a datastore that was made with the same
        settings.
        """
        file = self.folder / "config.json"
        if fresh or not file.is_file():
            return False
        stored = json.loads(file.read_text(encoding="utf-8")).get("specbench", {})
        expected = {**facts, **self._target_facts}
        return all(stored.get(name) == value for name, value in expected.items())

    @property
    def _target_facts(self) -> dict[str, str]:
        file = self.target / TOKENIZER
        tokenizer = {"tokenizer_sha256": _sha256(file)} if file.is_file() else {}
        return {"target": self.target.name, **tokenizer}

    def _write(self, texts: Sequence[Sequence[int]], facts: dict[str, Any]) -> Path:
        vocab = text_config(read_config(self.target)).vocab_size
        with staging_folder(self.folder, overwrite=None) as staging:
            write(texts, vocab, staging, {**facts, **self._target_facts})
        return self.folder


def _texts(file: Path) -> Iterator[str]:
    """Yield the texts of a file (one text per line of a `.jsonl` file)."""
    if file.suffix != ".jsonl":
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError as fault:
            raise UsageError(
                f"{file} is not UTF-8: {fault}", "convert the file to UTF-8, or leave it out"
            ) from None
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            text = row.get("text") if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise UsageError(
                    f'{file}:{number} is not JSON like {{"text": "..."}}',
                    "use one JSON object per line, in UTF-8, or plain text as FILE.txt",
                )
            yield text


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
