"""Parts of the target that serve as draft models, for self-speculative methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.models.decoder import ModelInput
from specbench_cli.engine.models.meter import Meter, Metered
from specbench_cli.engine.scoring import PendingScore, Scoring
from specbench_cli.engine.types import SUBLAYERS, ModelOutput, Role, Skip, Tokens, expand_skip
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members


@renamed_members(attending="attention_layers", reread="rescore")
class Partial(Metered):
    """A part of the target that drafts: its first layers, or all layers except some skipped ones.

    The target's final norm and output matrix follow the part's last layer. On the target's own
    state (`Session.state`), the part continues the committed text and attends to the target's rows.
    The engine discards the rows that the part writes there before the target scores. On a state of
    its own, the part works like any draft model. A part that does not begin with layer 0 reads
    `Hidden` rows.

    Args:
        scoring: The target's forwards and state.
        layers: Half-open range of layers. None means all layers.
        skip: Layers and sublayers to skip, as in `Decoder.forward`.
        keep: True if the target runs only the remaining layers when it scores the draft. The part
            must then be a range of first layers.

    Attributes:
        attention_layers: Layers whose attention runs. Only these layers write keys and values.

    Raises:
        MethodFault: The target has no such layers.
        ValueError: The target cannot skip single sublayers.
    """

    def __init__(
        self,
        scoring: Scoring,
        meter: Meter,
        *,
        layers: tuple[int, int] | None,
        skip: Skip,
        keep: bool = False,
        place: int | None = None,
    ) -> None:
        decoder = scoring.target.decoder
        super().__init__(decoder, meter, role="draft", place=place)
        low, high = layers or (0, decoder.n_layers)
        span, over = range(low, high), expand_skip(skip)
        if not 0 <= low < high <= decoder.n_layers:
            raise MethodFault(
                f"{decoder.name} has no layers {low} to {high}: it has {decoder.n_layers}",
                f"choose a range within (0, {decoder.n_layers})",
            )
        for at, kind in sorted(over):
            if at not in span or kind not in SUBLAYERS:
                raise MethodFault(
                    f"{(at, kind)} is not a sublayer of the layers {low} to {high - 1}",
                    "skip a layer by its number, a sublayer by (number, 'attention') or 'mlp'",
                )
        if keep and (low or over):
            raise MethodFault("`keep` needs a range of first layers, without skipped ones")
        self._scoring = scoring
        self._skip, self._exits_early = skip, high < decoder.n_layers
        self._layers = None if (low, high) == (0, decoder.n_layers) else (low, high)
        self.attention_layers = tuple(at for at in span if (at, "attention") not in over)
        self._pending = PendingScore(high) if keep and high < decoder.n_layers else None
        self.portion = decoder.share(self._layers, skip)

    def execute(
        self, model_input: ModelInput, *, role: Role | None = None, early: bool = False
    ) -> ModelOutput:
        """Run a forward through the layers of this part, and record it.

        Raises:
            MethodFault: The caller passed `layers`, `skip` or `early`.
        """
        if not model_input.runs_all_layers or early:
            raise MethodFault(
                "the layers of a part of the target are fixed",
                "leave out `layers`, `skip` and `early`, or create another part: `session.partial`",
            )
        x, state, early = model_input.x, model_input.state, self._exits_early
        model_input = model_input._replace(layers=self._layers, skip=self._skip)
        if role is None:
            read = not self.attention_layers or state.length(0, self.attention_layers[0])
            role = "draft" if read else "prefill"
        if state is not self._scoring.state:
            return super().execute(model_input, role=role, early=early)
        pending = self._scoring.begin_partial(self._pending)
        if pending is not None:
            captured_layers = [at for at in self._scoring.captured_layers if at < pending.end_layer]
            model_input = model_input._replace(captured_layers=captured_layers)
        out = super().execute(model_input, role=role, early=early)
        usual = model_input.mask is None and model_input.positions is None
        if pending is not None and isinstance(x, Tokens) and usual:
            pending.ids.append(x.ids)
            pending.outputs.append(out)
        return out

    def rescore(self, ids: Sequence[int], first: int) -> Tensor:
        """Run this part over committed tokens again, to compare it with the target.

        The tokens attend to the target's rows of the text before them. The function immediately
        discards the new rows. The forward counts as auxiliary.

        Args:
            ids: n tokens of the text.
            first: Position of the first of these tokens.

        Returns:
            Logits [n, V] after each token.
        """
        state, n, device = self._scoring.state, len(ids), self._scoring.target.device
        length, written = state.position(), state.length()
        causal = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        hidden = torch.zeros(n, length - first, dtype=torch.bool, device=device)
        positions = torch.arange(first, first + n, device=device)[None]
        mask = torch.cat((hidden, causal), 1)
        x = Tokens(host.ids([ids], device))
        out = self.execute(ModelInput(x, state, positions, mask, logits_at="all"), role="aux")
        state.rollback(0, length)
        assert state.length() == written
        return out.rows

    def forward_batch(
        self, parts: Sequence[ModelInput], *, captured_layers: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """Raise MethodFault, because a part of the target does not support batches."""
        raise MethodFault(
            "a part of the target drafts for one sequence at a time: each has a state of its own",
            "call each session's own `partial`",
        )
