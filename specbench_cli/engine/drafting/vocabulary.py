"""Comparison of the vocabularies of a target and a draft model with another tokenizer, as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.types import ModelOutput
from specbench_cli.former_names import renamed_members

SPECIAL_MARK = b"\xff"
"""Byte before and after the name of a special token. UTF-8 text cannot contain it."""

_LARGEST = 1 << 24
"""Largest valid token id, since a list of all ids up to it must fit in memory."""

_PARTS = re.compile(rb"(\xff[^\xff]*\xff)")


def special_piece(name: str) -> bytes:
    """Return the byte string that represents a special token: its name between two
    `SPECIAL_MARK`s."""
    return SPECIAL_MARK + name.encode() + SPECIAL_MARK


@renamed_members(spelt="decode")
@dataclass(frozen=True)
class Vocabulary:
    """The byte string of each token id of a tokenizer, and a function that tokenizes text.

    Attributes:
        pieces: Byte string of each id. Empty for ids that only pad the embedding matrix.
        tokenize: Function that returns the ids of a text, without special tokens.
        bos: Beginning-of-sequence id that the tokenizer puts before every text, or None.
    """

    pieces: Sequence[bytes]
    tokenize: Callable[[str], Sequence[int]] = lambda _: ()
    bos: int | None = None

    @classmethod
    def from_size(cls, n: int) -> Vocabulary:
        """Return a vocabulary of n ids, each of which is a different special token."""
        return cls([special_piece(str(token)) for token in range(n)])

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Return the vocabulary of a fast tokenizer of transformers.

        BOS and EOS have the same byte strings in all vocabularies, whatever their names.

        Raises:
            ValueError: The tokenizer encodes bytes in an unknown way, or an id is too large.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("it is not a fast tokenizer (tokenizer.json)")
        spell = _piece_decoder(json.loads(backend.to_str()))
        named = {
            tokenizer.eos_token_id: special_piece("eos"),
            tokenizer.bos_token_id: special_piece("bos"),
        }
        added = tokenizer.added_tokens_decoder
        tokens = tokenizer.get_vocab()
        largest = max(tokens.values(), default=0)
        if largest > _LARGEST:
            raise ValueError(f"it has the token id {largest}, larger than any vocabulary")
        pieces = [b""] * (1 + largest)
        for token, at in tokens.items():
            if at in named:
                pieces[at] = named[at]
            elif at in added:
                pieces[at] = special_piece(token) if added[at].special else token.encode()
            else:
                pieces[at] = spell(token)
        first = tokenizer.encode("")[:1]
        return cls(
            pieces,
            lambda text: tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True
            ),
            first[0] if first and first[0] == tokenizer.bos_token_id else None,
        )

    def with_size(self, n: int) -> Vocabulary:
        """Return the vocabulary resized to a model with n ids. Ids without a token get empty bytes.

        A model's matrices may have more rows than its tokenizer has tokens (padding). They may also
        have fewer rows (some tokens were added only to the tokenizer).
        """
        pieces = [*self.pieces[:n], *[b""] * (n - len(self.pieces))]
        begins = None if self.bos is None or self.bos >= n else self.bos
        return Vocabulary(pieces, self.tokenize, begins)

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Token id of each byte string. If several ids have the same byte string, the first of
        them.
        """
        return {piece: at for at, piece in reversed([*enumerate(self.pieces)]) if piece}

    def decode(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of some token ids. Padding ids have no bytes."""
        return b"".join(self.pieces[token] for token in ids if token < len(self.pieces))

    def encode(self, data: bytes) -> list[int]:
        """Return the token ids of bytes, which may include special tokens and incomplete
        characters.

        Special tokens and bytes that this vocabulary does not contain are dropped.
        """
        ids: list[int] = []
        for part in _PARTS.split(data):
            if part.startswith(SPECIAL_MARK):
                ids += [self.ids[part]] if part in self.ids else []
            else:
                ids += self._encode_text(part)
        return ids

    def _encode_text(self, data: bytes) -> Sequence[int]:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            whole = data[: error.start]
            if whole:
                return [*self._encode_text(whole), *self._encode_text(data[error.start :])]
            first = self.ids.get(_byte(data[0]))
            return [*([] if first is None else [first]), *self._encode_text(data[1:])]
        ids = self.tokenize(text) if text else ()
        if self.decode(ids) == data:
            return ids
        # Some tokenizers add a space before any text, but not after a newline. So tokenize with a
        # newline in front.
        after_newline = self.tokenize("\n" + text)
        for n in range(1, len(after_newline)):
            if self.decode(after_newline[n:]) == data:
                return after_newline[n:]
        return [
            self.ids[data[at : at + 1]] for at in range(len(data)) if data[at : at + 1] in self.ids
        ]


def _byte(value: int) -> bytes:
    return bytes((value,))


def _piece_decoder(tokenizer_json: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return a function from a token to its bytes, according to the decoder in tokenizer.json."""
    kinds = re.findall(
        r'"type": "(\w+)"', json.dumps([tokenizer_json["decoder"], tokenizer_json["pre_tokenizer"]])
    )
    if "ByteLevel" in kinds:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {sign: bytes([byte]) for byte, sign in bytes_to_unicode().items()}
        return lambda token: b"".join(byte_of.get(sign, b"") for sign in token)
    if "Metaspace" in kinds or "ByteFallback" in kinds:
        return lambda token: (
            bytes([int(token[3:5], 16)])
            if re.fullmatch(r"<0x[0-9A-F]{2}>", token)
            else token.replace("\u2581", " ").encode()
        )
    raise ValueError(f"unknown decoder of tokens: {', '.join(kinds) or 'none'}")


@renamed_members(to_target_logits="restrict_to_shared")
class Translation:
    """Map between the vocabularies of a target and of its draft model.

    Attributes:
        target, draft: The two vocabularies.
        device: Device of the models.
        target_to_draft: Draft model's id of each target token that both vocabularies contain.
        draft_to_target: Target's id of each draft token that both vocabularies contain.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, device: torch.device) -> None:
        self.target, self.draft, self.device = target, draft, device
        both = [(at, draft.ids[piece]) for piece, at in target.ids.items() if piece in draft.ids]
        self.target_to_draft = dict(both)
        self.draft_to_target = {theirs: ours for ours, theirs in both}
        self._rows = host.ids([theirs for _, theirs in both], device)
        self._at = host.ids([ours for ours, _ in both], device)
        self._ids = host.ids(
            [self.target_to_draft.get(at, 0) for at in range(len(target.pieces))], device
        )

    def restrict_to_shared(self, out: ModelOutput) -> ModelOutput:
        """Return the logits of the tokens that both vocabularies contain, by target id.

        All other target ids get logits of -inf.
        """
        rows = out.rows
        ours = rows.new_full((*rows.shape[:-1], len(self.target.pieces)), -torch.inf)
        ours[..., self._at] = rows[..., self._rows]
        return ModelOutput(ours[None], out.hidden)

    def to_draft_ids(self, tokens: Tensor) -> Tensor:
        """Return the draft model's ids of target tokens [n] that both vocabularies contain."""
        return self._ids[tokens]

    def spell_in_draft(self, token: int) -> list[int]:
        """Return the draft model's ids whose bytes together are a target token.

        The result is one id if both vocabularies contain the token. It is an empty list if no ids
        have these bytes, or if another target id has the same bytes.
        """
        piece = self.target.pieces[token]
        if self.target.ids.get(piece) != token:
            return []
        if token in self.target_to_draft:
            return [self.target_to_draft[token]]
        ids = self.draft.encode(piece)
        return ids if self.draft.decode(ids) == piece else []
