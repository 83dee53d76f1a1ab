"""The target's second reading under a contrast: the weakened prompt, and the output behind it."""

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
    """Reads every draft once more behind the weakened prompt, in lock-step with the text: what is
    committed there is kept here, and all else is rolled back. Its forwards count as the target's.

    Args:
        target: behind a meter.
        state: of the target, this reading's own.
        prompt: the request's.
        longest: tokens of an output, at most.
        place: of the text among those that are decoded together.
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
        # The text's own stop rule has cut what is committed.
        self._text = Text(contrast.weaken(prompt), StopRule(frozenset(), longest), target.device)
        self._scoring = Scoring(target, state, self._text, place)
        self._kept = 0  # end of the committed tokens in the state
        self._has_draft_rows = False  # True if rows of a draft follow them

    def set_state(self, state: State) -> None:
        """Have another state, before anything was read."""
        self._scoring.state = state

    def apply_contrast(self, draft: Draft, rows: Tensor) -> Tensor:
        """The target's logits at the root and the nodes of a draft, or behind the prompt, as the
        contrast has them; one forward.

        Args:
            rows: [m + 1, V], or [m, V] without the last node's of a chain; left as they are.
        """
        return self._contrast.apply(rows, self._read(draft, rows.shape[0]))

    def commit(self, outcome: Outcome) -> None:
        """Keep the rows of what was committed, but for those of its last token."""
        prompt = range(self._text.prompt_length) if not self._text.position else None
        self._text.append(outcome)
        if self._has_draft_rows:
            nodes = outcome.path[: len(outcome.committed) - 1]
            self._scoring.keep((0, *(node + 1 for node in nodes)) if prompt is None else prompt)
        self._has_draft_rows, self._kept = False, self._scoring.state.position()

    def _read(self, draft: Draft, n: int) -> Tensor:
        """Logits [n, V] behind the weakened prompt."""
        scoring, text = self._scoring, self._text
        if self._has_draft_rows:  # of a draft that nothing came of
            scoring.state.rollback(0, self._kept)
        self._has_draft_rows = True
        if not text.position:
            return scoring.forward(text.pending_tokens(0), None, "last")
        unread = text.pending_tokens(scoring.discard_partial_rows()).ids
        if unread.shape[1] > 1 and scoring.state.by_row:  # what was committed without a draft
            read = Tokens(unread[:, :-1])
            scoring.store_prompt_chunk(
                scoring.target.execute(ModelInput(read, scoring.state, logits_at=None))
            )
            unread, self._kept = unread[:, -1:], scoring.state.position()
        if draft.nodes >= n:
            draft = Draft(draft.tokens[: n - 1])
        x = Tokens(torch.cat((unread, draft.tokens[None]), 1))
        return scoring.forward(x, draft, "all")
