"""Construction of drafts: chains and trees of tokens that a method chose or drew at random."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.draft_validator import DraftValidator, check_ids, check_shape
from specbench_cli.engine.session_view import SessionView
from specbench_cli.engine.types import Draft, DrawMode, ModelOutput
from specbench_cli.engine.verify.choosing import Pick
from specbench_cli.engine.verify.processor import RequestProcessor
from specbench_cli.former_names import renamed_members


@renamed_members(drawn="chain_of_picks", ranked="candidate_lists")
class DraftBuilder(SessionView):
    """Base class of `Session` that contains the functions for building drafts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        processor = self.sampling.processor
        self._processing: RequestProcessor | None = None if processor is None else processor.begin()
        self._validator = DraftValidator(self._text, self._chooser)
        self._no_ids = host.ids((), self._text.device)

    # ---- drafts ---------------------------------------------------------------------------------

    def chain(self, ids: Sequence[int] | Tensor, q: Tensor | None = None) -> Draft:
        """Return a chain of draft tokens.

        Args:
            ids: Token ids of the m tokens, as a list or an int64 tensor [m].
            q: Distributions [m, V] that the m tokens were drawn from. None if the tokens were not
                drawn.

        Raises:
            MethodFault: An id is outside the target's vocabulary, or q has a wrong shape.
        """
        draft = Draft(self._tokens(ids))
        if q is not None and self._chooser.sampling.draws:
            self._validator.run(check_shape, q, (draft.nodes, self._chooser.vocab_size))
            draft = Draft(draft.tokens, draw_mode="independent", q=q)
        return self._validator.trust(draft)

    def tree(
        self,
        ids: Sequence[int] | Tensor,
        parents: tuple[int, ...],
        distributions: Sequence[Tensor] = (),
        how: DrawMode = "without_replacement",
    ) -> Draft:
        """Return a tree of draft tokens. The argument `parents` has the form that `Draft`
        describes.

        Args:
            ids: Ids of the m nodes. A tensor [m] int64 on a GPU is not checked, because the check
                would need a device sync. Such a tensor must come from `branch` or `candidates`.
            distributions: Tensors [V] or [r, V], which are concatenated to [m, V]. Row i is the
                distribution from which the first child among the siblings of node i was drawn.
                Empty if the nodes were not drawn.
            how: How the nodes were drawn.

        Raises:
            MethodFault: An id is outside the target's vocabulary.
        """
        draft = self._validator.trust(Draft(self._tokens(ids), parents))
        return (
            Draft(draft.tokens, parents, how, torch.vstack([*distributions]))
            if distributions
            else draft
        )

    def chain_of_picks(self, picks: Sequence[Pick]) -> Draft:
        """Return the chain of the tokens that consecutive calls of `pick` returned."""
        if not picks:
            return self.chain(())
        checks = self._validator
        tokens = checks.set_chain(
            torch.cat([self._text.last_token, *[token for token, _ in picks]])
        )
        distributions = [q for _, q in picks if q is not None]
        draft = (
            Draft(tokens, draw_mode="independent", q=torch.cat(distributions))
            if distributions
            else Draft(tokens)
        )
        own = checks.picks[-len(picks) :]
        if len(own) == len(picks) and all(map(is_, own, picks)):
            checks.trust(draft)
        return draft

    # ---- the tokens of drafts -------------------------------------------------------------------

    def pick(self, out: ModelOutput, ahead: int = 0) -> Pick:
        """Choose or draw one draft token from the last row of a draft model's logits.

        Args:
            out: Output of a draft model. Its vocabulary is the target's vocabulary, except for
                padding.
            ahead: Number of draft tokens between the last committed token and this token.

        Returns:
            A pair (token, q). token is [1] int64. q is the draft distribution [1, V] if
            verification needs it, otherwise None.
        """
        rows = self._process(cast(Tensor, out.logits)[:, -1], ahead)
        pick = self._chooser.pick(rows, self._text.position + ahead)
        self._validator.picks.append(pick)
        return pick

    def branch(
        self, rows: Tensor, width: int, *, how: DrawMode = "independent", ahead: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Choose or draw the children of draft nodes of one level.

        Rejection sampling uses `how`. "independent" and "without_replacement" draw from the draft
        distribution, and "deterministic" takes the most likely tokens. Greedy decoding and coupled
        sampling ignore `how` and take the tokens with the best scores.

        Args:
            rows: Logits [r, V'] of a draft model at the r nodes.
            width: Number of children of each node, sorted from best to worst.
            ahead: Number of draft tokens between the last committed token and the children.

        Returns:
            A pair (tokens, q). tokens is [r, width] int64. q is the draft distribution [r, V] if
            verification needs it, otherwise None.
        """
        return self._chooser.branch(rows, width, self._text.position + ahead, how)

    def candidates(
        self, rows: Tensor, width: int, *, ahead: int | Sequence[int] = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the most likely children of draft nodes, and the children's log-probabilities.

        Args:
            rows: Logits [r, V'] of a draft model at the r nodes.
            width: Number of children of each node, sorted from best to worst.
            ahead: Number of draft tokens between the last committed token and the children. One
                number for all nodes, or one per node.

        Returns:
            A pair (tokens, values) of tensors [r, width]. tokens are int64 ids. values are the
            log-softmax of the scores by which the decoding rule chooses tokens (`scores`).
        """
        depths = [ahead] * rows.shape[0] if isinstance(ahead, int) else ahead
        return self._chooser.candidates(rows, width, self._text.position, depths)

    def candidate_lists(
        self, rows: Tensor, width: int, *, ahead: int | Sequence[int] = 0
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the result of `candidates` as lists. Waits for the device."""
        depths = [ahead] * rows.shape[0] if isinstance(ahead, int) else ahead
        return self._chooser.candidate_lists(rows, width, self._text.position, depths)

    # ---- helpers --------------------------------------------------------------------------------

    def _process(self, rows: Tensor, ahead: int) -> Tensor:
        """Apply the run's logits processor to logits [1, V] that follow the last `ahead` draft
        tokens.
        """
        picks = self._validator.picks
        if self._processing is None or ahead > len(picks):
            return rows
        own = picks[len(picks) - ahead :]
        path = host.numbers(torch.cat([token for token, _ in own])) if own else []
        return self._processing.process_draft(self._chooser.align(rows), self._text.output, path)

    def _tokens(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Return ids [m] as a tensor on the device. Check them unless the check would
        need a sync."""
        text = self._text
        if isinstance(ids, Tensor):
            if not host.is_on_host(ids.device):
                return self._validator.set_chain(torch.cat((text.last_token, ids)))
            ids = host.numbers(ids)
        self._validator.run(check_ids, ids, self._chooser.vocab_size)
        if not ids:
            return self._no_ids
        return self._validator.set_chain(host.ids([text.tokens[-1], *ids], text.device))
