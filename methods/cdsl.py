"""CDSL: constrained decoding. It looks ahead only where the draft adds no required words.

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

    length: int = Field(
        5, ge=1, description="number of draft tokens per step, and of tokens per lookahead"
    )
    width: int = Field(5, ge=1, description="number of candidate next tokens that get a lookahead")
    weight: float = Field(
        5.0, ge=0, description="weight of the reward relative to log p; 0 makes the method lossless"
    )
    margin: float = Field(
        0.0, ge=0, le=1, description="minimum increase of the reward for which a draft is accepted"
    )
    words: WordList = Field(
        (),
        description="words that the output must contain; by default the words in quotation"
        " marks in the prompt",
    )
    mode: Literal["cdsl", "cdlh"] = Field(
        "cdsl", description="cdsl, or the paper's baseline cdlh, which looks ahead at every token"
    )


class Cdsl(Method):
    """CDSL: accepts a draft that adds required words to the output, and looks ahead otherwise.

    Lossy: a token that leads to more required words replaces the target's token. The user sets the
    required words in `words`. The reward is the share of the required words that the output
    contains. Once the output contains all of them, or if `weight` is 0, the method is standard
    speculative sampling (`sps`). For a hard constraint use the option `--grammar`, under which
    `sps` is exact.
    Differs from the paper: the test cases are specbench's own, because those of the paper are not
    public. The reward counts words only. `mode=cdlh` is the paper's baseline (CDLH), where the
    target looks ahead at every token.

    One step:
    1. The draft model drafts `length` tokens (0 in the baseline). One target forward scores them.
       The lossless rule accepts a prefix y and adds one token of the target.
    2. If y is not empty and the result raises the reward by at least `margin`, commit it.
    3. Otherwise take the target's `width` most likely next tokens x. After each, the draft model
       (in the baseline the target) greedily generates `length` tokens w. Commit the x with the best
       log p(x) + weight * reward(text x w).
    """

    name: ClassVar[str] = "cdsl"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("nakshatri2025cdsl",)
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[CdslParams]] = CdslParams
    params: CdslParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})
    lossless_counterpart: ClassVar[str | None] = "sps"
    exact_params: ClassVar[Mapping[str, Any]] = {"weight": 0.0}

    def guarantee(self, sampling: Rule) -> Guarantee:
        """Return the guarantee of `sps` if `weight` is 0, else "quality_only"."""
        return "quality_only" if self.params.weight else super().guarantee(sampling)

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the request, and yield each decoding step."""
        params, model = self.params, session.draft()
        prompt = session.vocabulary.decode(session.tokens()).decode(errors="replace")
        self.wanted = params.words or tuple(re.findall('"([^"]+)"', prompt))
        state, length = session.new_state(model), [FixedLength(params.length)]
        model.forward(session.pending_tokens(0), state, logits_at=None)
        session.prefill()
        while session.finish is None:
            reward_before = self.reward(session, ())
            lacks = params.weight > 0 and reward_before < 1
            alone = lacks and params.mode == "cdlh"
            chains = [] if alone else draft_chains(model, [(session, state)], length)
            rows = session.score(draft := chains[0] if chains else session.chain(()))  # step 1
            outcome = session.verify(draft, rows)
            gained = self.reward(session, outcome.committed) - reward_before
            ahead = lacks and (not outcome.path or gained < params.margin)  # step 2
            if ahead:
                args = (session.partial(), session.state) if alone else (model, state)
                token, rejected = (
                    self.look_ahead(session, rows[:1], *args),
                    draft.nodes > 0,
                )  # step 3
                outcome = Outcome(
                    (), (token,), ("recovered" if rejected else "plain",), int(rejected)
                )
            committed = session.commit(outcome)
            state.rollback(0, min(state.length(), len(session.tokens()) - 1))
            yield session.step(draft, committed, lookaheads=int(ahead))

    def look_ahead(self, session: Session, rows: Tensor, model: Metered, state: State) -> int:
        """Return the token whose lookahead has the best reward (step 3 in the docstring of the
        class).
        """
        ids, logs = session.candidates(rows, min(self.params.width, session.target.vocab_size))
        lookaheads = list[Tensor]()
        for token in ids[0].split(1):
            state.rollback(0, len(session.tokens()))
            x, lookahead = (
                torch.cat((session.pending_tokens(state.length()).ids[0], token)),
                [token],
            )
            while len(lookahead) <= min(self.params.length, session.max_draft_length()):
                x = model.forward(Tokens(x[None]), state).rows[-1:].argmax(-1)
                lookahead.append(x)
            lookaheads.append(torch.cat(lookahead))
        log_probs, *continuations = host.lists(logs[0], *lookaheads)
        rewards = [
            self.params.weight * self.reward(session, lookahead) for lookahead in continuations
        ]
        return int(
            max(
                zip(log_probs, rewards, continuations, strict=True), key=lambda each: sum(each[:2])
            )[2][0]
        )

    def reward(self, session: Session, ids: Sequence[int]) -> float:
        """Return the share of the required words in the output followed by `ids`.

        Return 1 if no words are required.
        """
        kept, _ = session.requests[0].stop.truncate(session.output(), ids)
        text = session.vocabulary.decode([*session.output(), *ids[:kept]]).decode(errors="replace")
        found = sum(word.lower() in text.lower() for word in self.wanted)
        return found / len(self.wanted) if self.wanted else 1.0
