"""The target's second forward in a run with contrastive decoding (`uscd`).

The second forward reads the weakened prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench_cli.engine.models.decoder import ModelInput, State
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.scoring import Scoring
from specbench_cli.engine.sequence import StopRule, Text
from specbench_cli.engine.types import Draft, Outcome, Tokens
from specbench_cli.engine.verify.uscd import Contrast


class WeakenedPromptReader:
    """Object that scores each draft a second time with the target, after the weakened prompt.

    The weakened prompt has the first token and the last tokens of the prompt. The logits of both
    prompts are contrasted (`Contrast`).

    Its model state keeps the rows of committed tokens, as the target's main state does. Its
    forwards count as forwards of the target.

    Args:
        target: The target, with metered forwards.
        state: A state of the target that only this object uses.
        prompt: The request's full prompt.
        longest: Maximum number of output tokens.
        place: Index of the sequence in its batch.
    """

    def __init__(
        self,
        contrast: Contrast,
        target: Metered,
        state: State,
        prompt: Sequence[int],
        longest: int,
        place: int = 0,
    ) -> None:
        self._contrast = contrast
        # The stop rule of this text has no stop tokens: the session's own stop rule has already
        # shortened each verification outcome before this text gets it.
        self._text = Text(contrast.weaken(prompt), StopRule(frozenset(), longest), target.device)
        self._scoring = Scoring(target, state, self._text, place)
        self._kept = 0  # end of the committed tokens in the state
        self._has_draft_rows = False  # True if rows of a draft follow them

    def set_state(self, state: State) -> None:
        """Replace the model state, before the first forward."""
        self._scoring.state = state

    def apply_contrast(self, draft: Draft, rows: Tensor) -> Tensor:
        """Return the logits after contrastive decoding, at the root and nodes of a draft, or after
        the prompt.

        The function runs one target forward over the weakened prompt and the text after it.

        Args:
            rows: Logits [m + 1, V], or [m, V] without the row of a chain's last node. The function
                does not change them.
        """
        return self._contrast.apply(rows, self._read(draft, rows.shape[0]))

    def commit(self, outcome: Outcome) -> None:
        """Keep the rows of the committed tokens, except for the last token."""
        prompt = range(self._text.prompt_length) if not self._text.position else None
        self._text.append(outcome)
        if self._has_draft_rows:
            nodes = outcome.path[: len(outcome.committed) - 1]
            self._scoring.keep((0, *(node + 1 for node in nodes)) if prompt is None else prompt)
        self._has_draft_rows, self._kept = False, self._scoring.state.position()

    def _read(self, draft: Draft, n: int) -> Tensor:
        """Run the target with the weakened prompt. Return the logits [n, V]."""
        scoring, text = self._scoring, self._text
        if self._has_draft_rows:  # rows of a draft without a commit
            scoring.state.rollback(0, self._kept)
        self._has_draft_rows = True
        if not text.position:
            return scoring.forward(text.pending_tokens(0), None, "last")
        pending = text.pending_tokens(scoring.discard_partial_rows()).ids
        if pending.shape[1] > 1 and scoring.state.by_row:  # tokens committed without a draft
            read = Tokens(pending[:, :-1])
            scoring.store_prompt_chunk(
                scoring.target.execute(ModelInput(read, scoring.state, logits_at=None))
            )
            pending, self._kept = pending[:, -1:], scoring.state.position()
        if draft.nodes >= n:
            draft = Draft(draft.tokens[: n - 1])
        x = Tokens(torch.cat((pending, draft.tokens[None]), 1))
        return scoring.forward(x, draft, "all")
