"""The text of a session in the vocabulary of a draft that has a tokenizer of its own.

Nothing here can change an output: what a draft reads is only ever a guess of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench_cli.engine import host
from specbench_cli.engine.drafting.vocabulary import Translation, Vocabulary
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Tokens
from specbench_cli.former_names import renamed_members

EXTRA_ROWS = 512
"""Rows that a draft's state has beyond the longest sequence of the run: it may need more tokens for
a text than the target does. Where they run out it drafts no more."""


@renamed_members(unread="pending_tokens", room="remaining")
class Transcript:
    """The text of a session as a draft with another tokenizer reads it, and that draft's state.

    Attributes:
        ids: the draft's, of all of the text that was followed so far.
        translation: between the two vocabularies.
        state: the draft's; its first rows are those of `ids`.
    """

    def __init__(self, session: Session, model: Metered) -> None:
        """Read a session's prompt, for a draft model of the run."""
        words, prompt = model.decoder.translation, session.tokens()
        if words is None:
            sizes = session.target.vocab_size, model.decoder.vocab_size
            ours, own = map(Vocabulary.from_size, sizes)
            words = Translation(ours, own, session.device)
        self.translation = words
        self.ids = words.draft.encode(words.target.decode(prompt))
        begins = words.draft.bos
        if begins is not None and self.ids[:1] != [begins]:
            self.ids.insert(0, begins)
        self._followed = len(prompt)
        longer = max(0, len(self.ids) - len(prompt))
        self.state = session.new_state(model, -(-(longer + EXTRA_ROWS) // EXTRA_ROWS) * EXTRA_ROWS)
        self._most: int = min(model.max_positions, self.state.capacity)

    @property
    def remaining(self) -> int:
        """How many tokens the draft can read and say behind the text; below 1 it has no place for
        them and drafts nothing."""
        return self._most - len(self.ids)

    def pending_tokens(self) -> Tokens:
        """The draft's tokens that its state has no rows of."""
        device = self.translation.device
        return Tokens(host.ids(self.ids[self.state.length() :], device)[None])

    def follow(self, tokens: Sequence[int], drafted: Sequence[int] = ()) -> int:
        """Go on to the end of the text; rows of what is not part of it are forgotten, and the last
        token's.

        Args:
            tokens: the target's, of all of the text.
            drafted: the draft's own tokens behind `ids`. They stand as far as they spell the text.
                Of the rest, tokens that both vocabularies have are taken as they are; what lies
                between is cut anew.
        Returns:
            how many of `drafted` stand.
        """
        target, draft = self.translation.target, self.translation.draft
        committed, self._followed = tokens[self._followed :], len(tokens)
        data, at, stood = target.decode(committed), 0, 0
        for token in drafted:
            piece = draft.pieces[token]
            if not piece or not data.startswith(piece, at):
                break
            at += len(piece)
            stood += 1
        self.ids += drafted[:stood]
        rows = min(self.state.length(), len(self.ids))
        loose, passed = b"", 0  # what is to be cut, and where the next token begins
        for token in committed:
            piece = target.pieces[token]
            begin, passed = passed, passed + len(piece)
            shared = self.translation.target_to_draft.get(token)
            if shared is None or begin < at:
                loose += piece[max(0, at - begin) :]
                continue
            self.ids += draft.encode(loose)
            self.ids.append(shared)
            loose = b""
        self.ids += draft.encode(loose)
        # The last token is fed with the next forward, even if it was drafted and has a row.
        self.state.rollback(0, min(rows, len(self.ids) - 1))
        return stood
