"""SpecEE: the target stops at an early layer where a predictor trusts what a draft foresaw.

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

from methods.specee.predictors import ExitPredictors, looked_at, seen
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

    threshold: float = Field(0.5, ge=0, le=1, description="least trust in an exit; off: 1")
    fill: Literal["none", "copy"] = Field("none", description="layers left out see the exit's row")
    recent: int = Field(5, ge=0, description="exits at and beside which it looks, too")
    gate: Literal["predictor", "random"] = Field("predictor", description="random: its control")
    rate: float = Field(0.3, ge=0, le=1, description="random: how often a layer is trusted")
    head: str = Field("auto", description="the predictors: the target's own, or a folder")


class SpecEE(Method):
    """SpecEE: the target leaves out its last layers where a draft's tokens settle early.

    Lossy: what an early layer says stands, and the layers above never see that token, or see it as
    the exit's row (`fill`; the authors' code: none). At threshold 1 its tokens are vanilla's.
    Differs from the paper: a draft model names the candidates, not an EAGLE head, whose features
    are of layers that did not run. Where tokens are drawn, which the paper does not do, the exit's
    likeliest one has to be a candidate, and what is drawn is of the exit's distribution.

    One step, which commits one token:
    1. The draft reads the text; its likeliest tokens are the candidates S.
    2. The layers to look at: those where most exits were in training, and those around recent ones.
    3. The target runs up to the next of these. Its row says z, the logits of S alone; P is their
       softmax, dP what has changed of P since the last look.
    4. If the predictor trusts (z, P, dP), the whole output matrix is asked: if its token is in S,
       that is the token, and the layers above do not run. Else go on with 3.
    5. No layer was trusted: the token is the target's own.
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
        """That of vanilla where no layer is trusted."""
        return super().guarantee(sampling) if self.params.threshold >= 1 else "quality_only"

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, a token a step."""
        self.predictors, model = session.artifact(self.artifacts()[0]), session.draft()
        state = session.new_state(model)
        model.forward(session.pending_tokens(0), state, logits_at=None)
        session.prefill()
        exits = deque[int](maxlen=self.params.recent)
        while session.finish is None:
            out = model.forward(session.pending_tokens(state.length()), state)
            ids = session.candidates(out.rows, self.predictors.top)[0][0]  # 1.
            layers = looked_at(self.predictors.layers, exits, session.target.n_layers)  # 2.
            draft = session.chain(())
            rows, left = self._scored(session, draft, layers, ids)  # 3. to 5.
            committed = session.commit(session.verify(draft, rows))
            exits.extend([left] if left else ())
            yield session.step(draft, committed, exits=int(left > 0), exit_layers=left)

    def _scored(
        self, session: Session, draft: Draft, layers: Sequence[int], ids: Tensor
    ) -> tuple[Tensor, int]:
        """Steps 3 to 5: logits [1, V], and how many layers had run at the exit; 0 without one."""
        halted, local, chosen = None, None, not session.sampling.draws
        for layer in layers:
            halted = halted or session.begin_score(draft, layer, early=False)
            halted.run_to(layer)
            features, local = seen(halted.early_logits_of(ids), local)
            if self._trusts(session, layer, features):
                rows = halted.exit_logits()
                scores = session.scores(rows, len(session.output())) if chosen else rows
                if host.number((ranking.argmax(scores) == ids).any()):
                    halted.exit_early(copy=self.params.fill == "copy")
                    return rows, layer
        return session.score(draft) if halted is None else halted.end().rows, 0

    def _trusts(self, session: Session, layer: int, features: Tensor) -> bool:
        """Step 4."""
        if self.params.gate == "random" and self.params.threshold < 1:
            trusts = session.random.bernoulli(features.new_full((1,), self.params.rate))
        else:
            trusts = self.predictors(layer, features) > self.params.threshold
        return bool(host.number(trusts[0]))
