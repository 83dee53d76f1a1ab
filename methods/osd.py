"""Online speculative decoding: the draft model learns from rejected tokens while it serves.

Xiaoxuan Liu, Lanxiang Hu, Peter Bailis, Alvin Cheung, Zhijie Deng, Ion Stoica, Hao Zhang: Online
Speculative Decoding, ICML 2024, arXiv:2310.07177, Algorithm 1.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch.nn import functional

from specbench_cli.api import (
    DraftModelMethod,
    Field,
    Metered,
    MethodParams,
    Outcome,
    Session,
    Topics,
)

ROUTER, DRAFT = "router", "draft of "
"""Keys in `session.memory`: that of the topic classifier, and the prefix of the key of a topic's
optimizer and buffer."""


class OsdParams(MethodParams):
    """Parameters of `Osd`."""

    length: int = Field(5, ge=1, description="number of draft tokens per step (authors' code: 5)")
    every: int = Field(
        8,
        ge=1,
        description="number of requests between two updates of the draft (authors' code: 8)",
    )
    rate: float = Field(
        1e-3, ge=0, description="learning rate (authors' code: 1e-4); 0 leaves the draft unchanged"
    )
    route: bool = Field(False, description="use a separate draft for each task category")


class Osd(DraftModelMethod):
    """OSD: between requests, the draft model learns the target's distribution at rejected tokens.

    Lossless because the draft model does not change during a request. A draft token x from q is
    accepted with probability min(1, p(x)/q(x)); a rejected token is replaced by a draw from
    norm(max(p - q, 0)), where p is the target's distribution.
    Differs from the authors' code: the loss covers only the positions that predicted rejected
    tokens. The authors' code takes the next position, and also the last token of every step. The
    target's distribution comes from verification and is not recomputed. With `route` each topic has
    its own draft model, as in the authors' code. The authors' code knows the topic of each
    question. Here a topic is a task category, and a classifier predicts it from earlier prompts.

    One step:
    1. The draft model of the prompt's most likely topic processes its pending tokens. Draw `length`
       tokens from it.
    2. (engine) One target forward over the last committed token and the draft; verify; commit.
    3. At a rejected token, store the position and the target's logits.
    4. Drop the draft model's KV entries of rejected tokens. After each request:
    5. Add the text, positions and logits to the buffer of the topic.
    6. After `every` requests: update the draft model once with the mean of KL(p || q) over all
       positions, and clear the buffer.
    """

    name: ClassVar[str] = "osd"
    aliases: ClassVar[tuple[str, ...]] = ("online",)
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("liu2024online",)
    Params: ClassVar[type[OsdParams]] = OsdParams
    params: OsdParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "corpus"
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def draft_model(self, session: Session) -> Metered:
        """Return the trainable copy of the draft model for the topic of the prompt."""
        topics = session.memory.setdefault(ROUTER, Topics())
        model: Metered = session.trainable("draft", topics.classify(session.tokens()))
        return model

    def start(self, session: Session) -> None:
        """Prefill the draft model."""
        super().start(session)
        self.places, self.distributions = list[int](), list[torch.Tensor]()

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Update the state after verification: steps 3 and 4 of the class docstring."""
        text = session.tokens()
        if outcome.origin[-1] == "recovered":
            self.places.append(len(text) - 1)  # position of the replacement of the rejected token
            self.distributions.append(session.verified_logits()[len(outcome.path)].clone())
        super().observe(session, outcome)

    def learn(self, session: Session) -> None:
        """Train the draft model after a request: steps 5 and 6 of the class docstring."""
        memory, request = session.memory, session.requests[0]
        topic = request.topic if self.params.route else ""
        model = session.trainable("draft", topic)
        if DRAFT + topic not in memory:
            weights = model.module.parameters()
            memory[DRAFT + topic] = (
                torch.optim.AdamW(weights, self.params.rate, weight_decay=0.0),
                [],
            )
        memory[ROUTER].learn(request.ids, topic)
        adam, buffer = memory[DRAFT + topic]
        buffer.append((list(session.tokens()), self.places, self.distributions))
        if len(buffer) < self.params.every:
            return
        # Step 6: Train the draft model at the rejected positions. The logits at one position
        # predict the token at the next position, so positions are shifted by one.
        num_rejected = sum(len(places) for _, places, _ in buffer)
        for ids, places, distributions in buffer:
            if places:
                input_ids = model.decoder.clamp_ids(torch.tensor([ids], device=session.device))
                rows, target_logits = model.module(input_ids).logits[0], torch.stack(distributions)
                shared = min(
                    rows.shape[-1], target_logits.shape[-1]
                )  # number of ids in both vocabularies
                q = rows[[at - 1 for at in places], :shared].float().log_softmax(-1)
                p = target_logits[:, :shared].float().log_softmax(-1)
                finite = q[0].isfinite()  # a pruned draft vocabulary has -inf logits
                divergence = functional.kl_div(
                    q[:, finite], p[:, finite], reduction="sum", log_target=True
                )
                (divergence / num_rejected).backward()
        if num_rejected:
            adam.step()
            adam.zero_grad()
        buffer.clear()
