"""CDSL: an answer that shall hold certain words, and looks ahead only where its draft fails.

Nakshatri et al.: Constrained Decoding with Speculative Lookaheads, NAACL 2025, arXiv:2412.10418.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from specbench_cli.api import (
    Field,
    FixedLength,
    Guarantee,
    Metered,
    Method,
    MethodParams,
    Outcome,
    Rule,
    Session,
    State,
    Step,
    Tokens,
    WordList,
    draft_chains,
    host,
)


class CdslParams(MethodParams):
    """Parameters of `Cdsl`."""

    length: int = Field(5, ge=1, description="draft tokens a step, and of a look ahead")
    width: int = Field(5, ge=1, description="tokens that are looked ahead from")
    weight: float = Field(5.0, ge=0, description="of the reward beside log p; off: 0")
    margin: float = Field(0.0, ge=0, le=1, description="what a draft has to add to the reward")
    words: WordList = Field((), description="that it shall hold; none: those the prompt quotes")
    mode: Literal["cdsl", "cdlh"] = Field("cdsl", description="cdlh: its baseline")


class Cdsl(Method):
    """CDSL: a draft stands if it helps to hold the wanted words; else the next token looks ahead.

    Lossy: a token that leads to more of the words takes the place of the target's. The reward is
    the share of the words that the output holds; once it holds all, at weight 0, and where no words
    are wanted, it is `sps`. (A hard constraint, `--grammar`, is the target's distribution: `sps` is
    exact.) Differs from the paper, whose table of cases was not at hand: this one is the harness's.
    Rewards are of words alone. `mode=cdlh` is the baseline (CDLH): the target looks ahead for each
    token.

    One step:
    1. The draft writes `length` tokens (in the baseline none); one target forward reads them; those
       that the lossless rule takes are y, and behind them comes the target's own token.
    2. If y is not empty and has added `margin` to the reward, which never falls, that is committed.
    3. Else the draft (or the target, on its own rows) goes on greedily by `length` tokens w behind
       each x of the target's `width` likeliest; the best log p(x) + weight reward(text x w) stands.
    """

    name: ClassVar[str] = "cdsl"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("nakshatri2025cdsl",)
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[CdslParams]] = CdslParams
    params: CdslParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})
    relative: ClassVar[str | None] = "sps"
    off: ClassVar[Mapping[str, Any]] = {"weight": 0.0}

    def guarantee(self, sampling: Rule) -> Guarantee:
        """That of `sps` where the reward weighs nothing."""
        return "quality_only" if self.params.weight else super().guarantee(sampling)

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request."""
        params, model = self.params, session.draft()
        prompt = session.words.decode(session.tokens()).decode(errors="replace")
        self.wanted = params.words or tuple(re.findall('"([^"]+)"', prompt))
        state, length = session.new_state(model), [FixedLength(params.length)]
        model.forward(session.since(0), state, logits_at=None)
        session.prefill()
        while session.finish is None:
            held = self.reward(session, ())
            lacks = params.weight > 0 and held < 1
            alone = lacks and params.mode == "cdlh"
            chains = [] if alone else draft_chains(model, [(session, state)], length)
            rows = session.score(draft := chains[0] if chains else session.chain(()))  # 1.
            outcome = session.verify(draft, rows)
            gained = self.reward(session, outcome.committed) - held
            ahead = lacks and (not outcome.path or gained < params.margin)  # 2.
            if ahead:
                by = (session.partial(), session.state) if alone else (model, state)
                token, falls = self.looked_ahead(session, rows[:1], *by), draft.nodes > 0  # 3.
                outcome = Outcome((), (token,), ("recovered" if falls else "plain",), int(falls))
            committed = session.commit(outcome)
            state.rollback(0, min(state.length(), len(session.tokens()) - 1))
            yield session.step(draft, committed, lookaheads=int(ahead))

    def looked_ahead(self, session: Session, rows: Tensor, model: Metered, state: State) -> int:
        """Step 3."""
        ids, logs = session.candidates(rows, min(self.params.width, session.target.vocab_size))
        ways = list[Tensor]()
        for token in ids[0].split(1):
            state.rollback(0, len(session.tokens()))
            x, way = torch.cat((session.since(state.length()).ids[0], token)), [token]
            while len(way) <= min(self.params.length, session.room()):
                x = model.forward(Tokens(x[None]), state).rows[-1:].argmax(-1)
                way.append(x)
            ways.append(torch.cat(way))
        told, *said = host.lists(logs[0], *ways)
        won = [self.params.weight * self.reward(session, way) for way in said]
        return int(max(zip(told, won, said, strict=True), key=lambda each: sum(each[:2]))[2][0])

    def reward(self, session: Session, ids: Sequence[int]) -> float:
        """The share of the words that the output holds, with some tokens behind it; 1 of none."""
        kept, _ = session.requests[0].stop.cut(session.output(), ids)
        text = session.words.decode([*session.output(), *ids[:kept]]).decode(errors="replace")
        found = sum(word.lower() in text.lower() for word in self.wanted)
        return found / len(self.wanted) if self.wanted else 1.0
