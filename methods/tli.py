"""Speculative sampling with the tokens that two vocabularies share: token-level intersection (TLI).

Nadav Timor et al.: Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies, ICML 2025, arXiv:2502.05202, Algorithm 4.
"""

from __future__ import annotations

from typing import ClassVar

from specbench_cli.api import (
    Draft,
    Field,
    Method,
    MethodParams,
    Outcome,
    Pick,
    Session,
    Tokens,
    Transcript,
)


class TliParams(MethodParams):
    """Parameters of `Tli`."""

    length: int = Field(5, ge=1, description="number of draft tokens per step")


class Tli(Method):
    """TLI: a draft model with another tokenizer draws from the tokens of both vocabularies.

    Lossless because q, the draft model's distribution over the shared tokens, is a distribution
    over the target's vocabulary. A token x from q is accepted with probability min(1, p(x)/q(x)),
    where p is the target's distribution. A rejected token is replaced by a draw from norm(max(p -
    q, 0)).
    Differs from the paper: temperature, top-k and top-p apply to the logits of the shared tokens,
    so that greedy decoding drafts the most likely shared token.

    If the draft model has the target's tokenizer, the method is standard speculative sampling
    (`sps`).

    One step:
    1. Translate the committed tokens into the draft model's vocabulary. Shared tokens are
       translated directly. The text of other tokens is tokenized again.
    2. The draft model processes these tokens. Keep its logits of shared tokens, under the target's
       token ids. All other logits are -inf.
    3. Draw a token, and let the draft model process it. Repeat `length` times.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    5. Drop the draft model's KV entries of rejected tokens.
    """

    name: ClassVar[str] = "tli"
    family: ClassVar[str] = "a draft model with any tokenizer"
    proposed_in: ClassVar[tuple[str, ...]] = ("timor2025heterogeneous",)
    Params: ClassVar[type[TliParams]] = TliParams
    params: TliParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    any_vocabulary: ClassVar[bool] = True
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def start(self, session: Session) -> None:
        """Prefill the draft model with the prompt, tokenized with its own tokenizer."""
        self.model = session.draft()
        self.text = Transcript(session, self.model)
        if self.text.remaining > 0:
            self.model.forward(self.text.pending_tokens(), self.text.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        # Step 1: Translate the committed tokens into the draft model's vocabulary.
        self.text.follow(session.tokens())
        translation, picks = self.text.translation, list[Pick]()
        x = self.text.pending_tokens()
        while len(picks) < min(self.params.length, limit, self.text.remaining):
            # Step 2: q is the draft model's distribution, restricted to shared tokens.
            logits = self.model.forward(x, self.text.state)
            # Step 3: Draw a token, and let the draft model process it.
            picks.append(session.pick(translation.restrict_to_shared(logits), len(picks)))
            x = Tokens(translation.to_draft_ids(picks[-1][0])[None])
        return session.chain_of_picks(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 5 of the class docstring.

        The draft model has no KV entry for the last committed token yet.
        """
        draft_of, stood = (
            self.text.translation.target_to_draft,
            outcome.committed[: len(outcome.path)],
        )
        self.text.follow(session.tokens(), [draft_of[token] for token in stood])
