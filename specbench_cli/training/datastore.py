"""Making a datastore for REST: of a target's own replies, or of texts that the user has."""

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

AT_ONCE = 512
"""Texts that are tokenized together."""


@dataclass(frozen=True)
class DatastoreMaker:
    """What a datastore is made for.

    Args:
        out: folder that gets `datastore/`; it may hold the target's replies already.
        target: folder of the model whose tokens the texts are in.
        progress: told how many replies or texts there are so far.
    """

    out: Path
    target: Path
    progress: Callable[[int], None] = lambda _: None

    @property
    def folder(self) -> Path:
        """Where it comes to lie."""
        return self.out / Datastore.kind

    def make_from_replies(
        self, gsm8k: Sequence[Chat], n: int, seed: int, device: torch.device, *, fresh: bool
    ) -> Path:
        """Make one of the target's answers to questions like those of training.

        They are sampled at temperature 1, the same that heads are trained on, and kept in the work
        folder; an answer begins with the token that ends its question.

        Args:
            gsm8k: problems among the questions; empty = generated text alone.
            fresh: make it even if it is there already.

        Raises:
            UsageError: the work folder holds the replies of another target, or this one's chats are
                not the embedded family's.
        """
        sha = Weights(self.target).sha256()
        facts: dict[str, Any] = {"from": "replies", "replies": n, "seed": seed}
        facts |= {"problems": len(gsm8k), "target_sha256": sha}
        if self._is_current(facts, fresh):
            return self.folder
        tokenizer = read_tokenizer(self.target)
        if not tokenizer.get_vocab().keys() >= set(SPECIAL_TOKENS):
            raise UsageError(
                f"{self.target.name} is not of the embedded family, whose chats are asked",
                "give texts to retrieve from: --text FILE.txt or FILE.jsonl",
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
        """Make one of files in UTF-8: of `.jsonl` the `text` of each line, of others all as one
        text.

        Raises:
            UsageError: a file is not there, is no such text, or is empty.
        """
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise UsageError(f"there is no file {missing[0]}", "--text FILE.txt or FILE.jsonl")
        facts = {"from": [{"file": file.name, "sha256": _sha256(file)} for file in files]}
        if self._is_current(facts, fresh):
            return self.folder
        tokenizer = read_tokenizer(self.target)
        found: list[list[int]] = []
        texts = (text for file in files for text in _texts(file))
        while some := list(islice(texts, AT_ONCE)):
            found += tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
            self.progress(len(found))
        if not any(found):
            raise UsageError("the files hold no text", "--text FILE.txt or FILE.jsonl")
        return self._write(found, facts)

    def _is_current(self, facts: dict[str, Any], fresh: bool) -> bool:
        """Whether the folder holds the datastore that is asked for."""
        file = self.folder / "config.json"
        if fresh or not file.is_file():
            return False
        held = json.loads(file.read_text(encoding="utf-8")).get("specbench", {})
        return all(held.get(name) == value for name, value in {**facts, **self._made_for}.items())

    @property
    def _made_for(self) -> dict[str, str]:
        file = self.target / TOKENIZER
        known = {"tokenizer_sha256": _sha256(file)} if file.is_file() else {}
        return {"target": self.target.name, **known}

    def _write(self, texts: Sequence[Sequence[int]], facts: dict[str, Any]) -> Path:
        vocab = text_config(read_config(self.target)).vocab_size
        with staging_folder(self.folder, overwrite=None) as staging:
            write(texts, vocab, staging, {**facts, **self._made_for})
        return self.folder


def _texts(file: Path) -> Iterator[str]:
    """The texts of a file."""
    if file.suffix != ".jsonl":
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError as fault:
            raise UsageError(
                f"{file} is not UTF-8: {fault}", "convert it, or leave it out"
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
                    "one object a line, in UTF-8; or give plain text as FILE.txt",
                )
            yield text


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
