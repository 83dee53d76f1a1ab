"""UAG: a draft model with any tokenizer, matched by its text (SLEM, string-level exact match).

Nadav Timor et al.: Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies, ICML 2025, arXiv:2502.05202, Algorithm 2; transformers' universal
assisted generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from specbench_cli.api import (
    Draft,
    Field,
    Method,
    MethodParams,
    Outcome,
    Session,
    Tokens,
    Transcript,
    host,
)


class UagParams(MethodParams):
    """Parameters of `Uag`."""

    length: int = Field(
        5, ge=1, description="number of draft tokens per step, in the draft's vocabulary"
    )
    behind: int = Field(
        10,
        ge=0,
        description="number of committed tokens before the draft that are tokenized again"
        " together with it",
    )


class Uag(Method):
    """UAG: a draft model with any tokenizer writes text, which is tokenized for the target.

    Lossless because a draft token is accepted if and only if the target chooses the same token,
    greedily or by its own random draw.
    Differs from the sources: the draft model decodes greedily at every temperature. Draft tokens
    are matched to the committed text by their bytes. transformers compares windows of tokens.

    One step:
    1. Translate the committed text into the draft model's vocabulary. Keep the draft tokens that
       match the text. Tokenize the rest of the text, and drop the KV entries of other draft tokens.
    2. The draft model generates `length` tokens.
    3. Tokenize the text of these tokens for the target, together with the last tokens before it.
       The token boundaries then match the target's tokenizer.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    """

    name: ClassVar[str] = "uag"
    aliases: ClassVar[tuple[str, ...]] = ("slem",)
    family: ClassVar[str] = "a draft model with any tokenizer"
    proposed_in: ClassVar[tuple[str, ...]] = ("timor2025heterogeneous",)
    Params: ClassVar[type[UagParams]] = UagParams
    params: UagParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    any_vocabulary: ClassVar[bool] = True
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def start(self, session: Session) -> None:
        """Prefill the draft model with the prompt, tokenized with its own tokenizer."""
        self.model = session.draft()
        self.text = Transcript(session, self.model)
        self.written: list[int] = []
        if self.text.remaining > 0:
            self.model.forward(self.text.pending_tokens(), self.text.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        # Step 1: Translate the committed text into the draft model's vocabulary.
        self.text.follow(session.tokens())
        # Step 2: The draft model generates tokens.
        x, tokens = self.text.pending_tokens(), list[Tensor]()
        while limit and len(tokens) < min(self.params.length, self.text.remaining):
            tokens.append(self.model.forward(x, self.text.state).rows[-1:].argmax(-1))
            x = Tokens(tokens[-1][None])
        self.written = host.numbers(torch.cat(tokens)) if tokens else []
        # Step 3: Tokenize the text of these tokens for the target.
        before = session.tokens()[-self.params.behind :] if self.params.behind else ()
        return session.chain(self.tokenize_draft(before)[:limit])

    def tokenize_draft(self, before: Sequence[int]) -> list[int]:
        """Return the target tokens that represent the text of the draft tokens `written`.

        A target token may contain both the end of the committed text and the beginning of the
        draft. So the last committed tokens are tokenized together with the draft. If this changes
        them, the draft is tokenized alone.

        Args:
            before: Last committed tokens.
        """
        target, draft = self.text.translation.target, self.text.translation.draft
        data = complete_characters(draft.decode(self.written))
        both = target.encode(target.decode(before) + data)
        if both[: len(before)] == [*before]:
            return both[len(before) :]
        return target.encode(data)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Translate the newly committed text: step 1 of the next decoding step.

        The draft model has no KV entry for the last committed token yet.
        """
        self.text.follow(session.tokens(), self.written)


def complete_characters(data: bytes) -> bytes:
    """Return the bytes without an incomplete UTF-8 character at the end."""
    for n in range(1, min(3, len(data)) + 1):
        lead = data[-n]
        if 0xC0 <= lead < 0xF8:  # begins a character of two bytes, three or four
            size = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data[:-n] if size > n else data
        if not 0x80 <= lead < 0xC0:  # is one by itself
            break
    return data
