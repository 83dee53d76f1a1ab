"""Target forwards with extra rows for a `LookAhead` head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from specbench_cli.engine.models.decoder import ModelInput
from specbench_cli.engine.models.meter import Metered, MeteredHead
from specbench_cli.engine.types import Hidden, ModelOutput, Tokens
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members


@renamed_members(newest="latest_logits")
class LookAheadRows:
    """Target forwards that also compute the extra rows of a `LookAhead` head and their logits.

    Such a forward runs in two parts. The lower layers run without the extra rows. The upper layers
    run with the extra rows, which are further branches of the tree.

    Args:
        head: The `LookAhead` head, with metered calls.
    """

    def __init__(self, target: Metered, head: MeteredHead) -> None:
        self._target, self._head = target, head
        self._levels: int = head.sizes["levels"]
        self._layer: int = head.layer
        self._upper_layers = (self._layer, target.n_layers)
        self._logits: Tensor | None = None  # [n, levels, V]; for a prompt, only after its last row
        self._latest_logits: Tensor | None = None

    def count_rows(self, nodes: int) -> int:
        """Return the number of state rows that a forward over the root and `nodes` draft nodes
        needs.
        """
        return nodes + (nodes + 1) * self._levels

    def prefill(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward over the prompt, then a forward over the extra rows after the last prompt
        token.
        """
        x, state = model_input.x, model_input.state
        assert isinstance(x, Tokens)
        captured = {*model_input.captured_layers, *self._head.captured_layers}
        out = self._target.execute(model_input._replace(captured_layers=sorted(captured)))
        last = x.ids[0, -1:]
        rows = (
            out.aux_hidden_states[self._layer - 1][0, -1:]
            if self._layer
            else self._target.embed(last)
        )
        position = state.position()
        positions = torch.arange(position, position + self._levels, device=x.ids.device)
        ahead = ModelInput(
            Hidden(self._head(rows)),
            state,
            positions[None],
            logits_at="all",
            layers=self._upper_layers,
        )
        ahead_output = self._target.execute(ahead, role="draft")
        state.rollback(0, position)
        self._logits = cast(Tensor, ahead_output.logits)
        return out

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward over the root and a draft, with extra rows after each of these tokens.

        The output contains only the rows of the root and the draft.

        Args:
            model_input: Input with explicit positions [1, n] and a mask [n, n], also if the draft
                is a chain.
        """
        x, positions, mask = model_input.x, model_input.positions, model_input.mask
        assert isinstance(x, Tokens)
        assert positions is not None
        assert mask is not None
        n, layer, captured_layers = x.ids.shape[1], self._layer, model_input.captured_layers
        if layer:
            early = [at for at in captured_layers if at < layer]
            first = self._target.execute(
                model_input._replace(layers=(0, layer), logits_at=None, captured_layers=early)
            )
            rows, lower_states = first.hidden, dict(first.aux_hidden_states)
        else:
            rows, lower_states = self._target.embed(x.ids), {}
        look_ahead_rows = self._head(rows[0]).flatten(0, 1)
        visibility, all_positions = append_branches(mask, positions[0], self._levels)
        out = self._target.execute(
            model_input._replace(
                x=Hidden(torch.cat((rows, look_ahead_rows[None]), 1)),
                positions=all_positions[None],
                mask=visibility,
                logits_at="all",
                layers=self._upper_layers,
                captured_layers=[at for at in captured_layers if at >= layer],
            )
        )
        logits = cast(Tensor, out.logits)
        self._logits = logits[0, n:].unflatten(0, (n, self._levels))
        upper_states = {at: left[:, :n] for at, left in out.aux_hidden_states.items()}
        return ModelOutput(logits[:, :n], out.hidden[:, :n], lower_states | upper_states)

    def keep(self, path: Sequence[int]) -> None:
        """Store the logits of the extra rows that follow the last row of `path`."""
        assert self._logits is not None
        self._latest_logits = self._logits[path[-1] if len(self._logits) > 1 else 0]

    def latest_logits(self) -> Tensor:
        """Return the logits [levels, V] for the tokens after the last committed token.

        Row k predicts the token k + 1 positions after the last committed token.

        Raises:
            MethodFault: `prefill` was not called before.
        """
        if self._latest_logits is None:
            raise MethodFault(
                "there are no logits before the prefill", "call `latest_logits` in `propose`"
            )
        return self._latest_logits


def append_branches(mask: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Add to each of n rows a chain of k rows that continues it. Return the new mask and positions.

    Args:
        mask: Bool mask [n, n]: which row attends to which row.
        positions: Positions [n] of the rows.

    Returns:
        A pair: the mask [n + n k, n + n k] and the positions [n + n k]. The n given
            rows come first, then the chain of row 0, then that of row 1, and so on.
    """
    n, device = len(mask), mask.device
    visibility = mask.new_zeros(n + n * k, n + n * k)
    visibility[:n, :n] = mask
    visibility[n:, :n] = mask.repeat_interleave(k, 0)
    chain = torch.ones(k, k, dtype=torch.bool, device=device).tril()
    visibility[n:, n:] = torch.block_diag(*[chain] * n)
    branch_positions = positions[:, None] + torch.arange(1, k + 1, device=device)
    return visibility, torch.cat((positions, branch_positions.flatten()))
