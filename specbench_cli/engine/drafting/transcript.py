"""The text of a session, tokenized for a draft model with another tokenizer than the target's.

An error in this module cannot change an output, because it affects only draft tokens.
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
"""Extra rows of the draft's state beyond the longest sequence of the run.

The draft's tokenizer may need more tokens for a text than the target's. If no row is free, the
draft model drafts no more tokens."""


@renamed_members(unread="pending_tokens", room="remaining")
class Transcript:
    """The text of a session in the draft model's tokens, and the state of the draft model.

    Attributes:
        ids: Draft model's token ids of the text so far.
        translation: Map between the vocabularies of target and draft model.
        state: State of the draft model. Its first rows belong to `ids`.
    """

    def __init__(self, session: Session, model: Metered) -> None:
        """Tokenize the prompt of a session for one of the run's draft models."""
        translation, prompt = model.decoder.translation, session.tokens()
        if translation is None:
            sizes = session.target.vocab_size, model.decoder.vocab_size
            ours, own = map(Vocabulary.from_size, sizes)
            translation = Translation(ours, own, session.device)
        self.translation = translation
        self.ids = translation.draft.encode(translation.target.decode(prompt))
        begins = translation.draft.bos
        if begins is not None and self.ids[:1] != [begins]:
            self.ids.insert(0, begins)
        self._followed = len(prompt)
        longer = max(0, len(self.ids) - len(prompt))
        self.state = session.new_state(model, -(-(longer + EXTRA_ROWS) // EXTRA_ROWS) * EXTRA_ROWS)
        self._most: int = min(model.max_positions, self.state.capacity)

    @property
    def remaining(self) -> int:
        """Number of tokens that the draft model's state can still store after the text."""
        return self._most - len(self.ids)

    def pending_tokens(self) -> Tokens:
        """Return the tokens of the text that the draft model has not processed."""
        device = self.translation.device
        return Tokens(host.ids(self.ids[self.state.length() :], device)[None])

    def follow(self, tokens: Sequence[int], drafted: Sequence[int] = ()) -> int:
        """Extend `ids` to the end of the text, and roll the draft model's state back.

        The state drops the rows of rejected tokens and the row of the last token.

        Args:
            tokens: Target tokens of the whole text.
            drafted: Draft tokens that followed `ids`. They are kept as long as their bytes match
                the text. In the rest of the text, a token that both vocabularies contain is mapped
                to its counterpart. All other bytes are tokenized again.

        Returns:
            Number of tokens of `drafted` that are kept.
        """
        target, draft = self.translation.target, self.translation.draft
        committed, self._followed = tokens[self._followed :], len(tokens)
        data, at, num_kept = target.decode(committed), 0, 0
        for token in drafted:
            piece = draft.pieces[token]
            if not piece or not data.startswith(piece, at):
                break
            at += len(piece)
            num_kept += 1
        self.ids += drafted[:num_kept]
        rows = min(self.state.length(), len(self.ids))
        loose, passed = b"", 0  # bytes to tokenize, and the start of the next token
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
        # Drop the last token's row even if the token was drafted: the next forward processes it
        # again.
        self.state.rollback(0, min(rows, len(self.ids) - 1))
        return num_kept
