"""SpecEE: speculative early exiting. The target stops at an early layer if a predictor trusts it.

Jiaming Xu, Jiayi Pan, Yongkang Zhou, Siming Chen, Jinhao Li, Yaoxiu Lian, Junyi Wu, Guohao Dai:
SpecEE: Accelerating Large Language Model Inference with Speculative Early Exiting, ISCA 2025,
arXiv:2504.08850.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from methods.specee.predictors import ExitPredictors, choose_layers, make_predictor_input
from specbench_cli.api import (
    Artifact,
    Draft,
    Field,
    Guarantee,
    Method,
    MethodParams,
    Rule,
    Session,
    Step,
    host,
    ranking,
)


class SpecEEParams(MethodParams):
    """Parameters of `SpecEE`."""

    threshold: float = Field(
        0.5,
        ge=0,
        le=1,
        description="minimum probability for which a predictor trusts an exit (authors' code:"
        " 0.5); 1 makes the method lossless",
    )
    fill: Literal["none", "copy"] = Field(
        "none",
        description="input of the skipped layers for this token: nothing (none), or the exit's"
        " hidden state (copy)",
    )
    recent: int = Field(
        5, ge=0, description="number of recent exits whose layers, and those near them, are checked"
    )
    gate: Literal["predictor", "random"] = Field(
        "predictor",
        description="what decides about an exit: the trained predictor, or chance (random), as"
        " a control",
    )
    rate: float = Field(
        0.3, ge=0, le=1, description="gate=random: probability that a checked layer is trusted"
    )
    head: str = Field(
        "auto",
        description="exit predictors: auto (the default ones of the target), a folder or a hub id",
    )


class SpecEE(Method):
    """SpecEE: the target skips its last layers if an early layer already predicts a draft token.

    Lossy: the token that an early layer predicts is committed. By default, the later layers do not
    process this position, as in the authors' code. With the parameter `fill`, they process a copy
    of the exit's hidden state. At threshold 1 the method generates the same tokens as vanilla.
    Differs from the paper: a draft model proposes the candidates, not an EAGLE head, which would
    need features of layers that did not run. The paper covers only greedy decoding. In sampling,
    the exit's most likely token must be a candidate, and the token is drawn from the exit's
    distribution.

    One step, which commits one token:
    1. The draft model reads the text. Its most likely next tokens are the candidates S.
    2. Two-level scheduling: check the layers with the most exits in training (offline), and the
       layers near recent exits (online).
    3. Run the target up to the next of these layers. Compute only the logits z of S. P is their
       softmax (local probabilities), and dP is the change of P since the last check.
    4. If the predictor trusts this layer, given (z, P, dP), compute the logits of all tokens. If
       the most likely token is in S, commit it without running the later layers. Otherwise continue
       with step 3.
    5. If no layer is trusted, commit the target's own token.
    """

    name: ClassVar[str] = "specee"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("xu2025specee",)
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[SpecEEParams]] = SpecEEParams
    params: SpecEEParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    Head: ClassVar[type[Artifact]] = ExitPredictors
    tunable: ClassVar[frozenset[str] | None] = frozenset({"recent"})
    exact_params: ClassVar[Mapping[str, Any]] = {"threshold": 1.0}
    proposes: ClassVar[bool] = False

    def guarantee(self, sampling: Rule) -> Guarantee:
        """Return the guarantee of vanilla if the threshold is 1, else "quality_only"."""
        return super().guarantee(sampling) if self.params.threshold >= 1 else "quality_only"

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, one token per step."""
        self.predictors, model = session.artifact(self.artifacts()[0]), session.draft()
        state = session.new_state(model)
        model.forward(session.pending_tokens(0), state, logits_at=None)
        session.prefill()
        exits = deque[int](maxlen=self.params.recent)
        while session.finish is None:
            out = model.forward(session.pending_tokens(state.length()), state)
            ids = session.candidates(out.rows, self.predictors.top)[0][0]  # step 1
            layers = choose_layers(self.predictors.layers, exits, session.target.n_layers)  # step 2
            draft = session.chain(())
            rows, left = self._score_until_exit(session, draft, layers, ids)  # steps 3 to 5
            committed = session.commit(session.verify(draft, rows))
            exits.extend([left] if left else ())
            yield session.step(draft, committed, exits=int(left > 0), exit_layers=left)

    def _score_until_exit(
        self, session: Session, draft: Draft, layers: Sequence[int], ids: Tensor
    ) -> tuple[Tensor, int]:
        """Run the target until a layer is trusted: steps 3 to 5 of the class docstring.

        Return the logits [1, V] and the number of layers at the exit. The number is 0 if no layer
        is trusted.
        """
        halted, local, chosen = None, None, not session.sampling.draws
        for layer in layers:
            halted = halted or session.begin_score(draft, layer, early=False)
            halted.run_to(layer)
            features, local = make_predictor_input(halted.early_logits_of(ids), local)
            if self._trusts(session, layer, features):
                rows = halted.exit_logits()
                scores = session.scores(rows, len(session.output())) if chosen else rows
                if host.number((ranking.argmax(scores) == ids).any()):
                    halted.exit_early(copy=self.params.fill == "copy")
                    return rows, layer
        return session.score(draft) if halted is None else halted.end().rows, 0

    def _trusts(self, session: Session, layer: int, features: Tensor) -> bool:
        """Return True if the predictor of this layer trusts the layer: step 4 of the class
        docstring.
        """
        if self.params.gate == "random" and self.params.threshold < 1:
            trusts = session.random.bernoulli(features.new_full((1,), self.params.rate))
        else:
            trusts = self.predictors(layer, features) > self.params.threshold
        return bool(host.number(trusts[0]))
