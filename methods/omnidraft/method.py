"""OmniDraft: a draft model with any tokenizer, and an n-gram cache between the vocabularies.

Ramchalam Kinattinkara Ramakrishnan et al.: OmniDraft: A Cross-vocabulary, Online Adaptive Drafter
for On-device Speculative Decoding, NeurIPS 2025, arXiv:2507.02659.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from methods.omnidraft.ngram_cache import NgramCache
from specbench_cli.api import (
    Draft,
    Field,
    Method,
    MethodParams,
    ModelOutput,
    Outcome,
    Pick,
    Session,
    Tokens,
    Transcript,
    host,
)


class OmniDraftParams(MethodParams):
    """Parameters of `OmniDraft`."""

    length: int = Field(
        5, ge=1, description="number of draft tokens per step, in the target's vocabulary"
    )
    memory: int = Field(4096, ge=0, description="maximum number of n-grams in the cache")


class OmniDraft(Method):
    """OmniDraft: merges draft tokens that together have the text of one target token.

    The cache contains n-grams: sequences of draft tokens with the text of one target token.
    Lossless because q, which verification uses, is the distribution from which a token is drawn. q
    gives probability to tokens of both vocabularies (shared tokens), and to the target tokens of
    cached n-grams at the start of the draft model's continuation. A token x is accepted with
    probability min(1, p(x)/q(x)); a rejected token is replaced by a draw from norm(max(p - q, 0)),
    where p is the target's distribution.
    Differs from the paper: the probability of an n-gram is subtracted from that of the token that
    begins it. Only n-grams along the draft model's most likely tokens are considered, because
    others need further forwards. N-grams of the prompt are cached too. The draft model does not
    learn online (the method `osd` does), and no head decides when to stop drafting.

    One step:
    1. Translate the committed tokens into the draft model's vocabulary. Tokens that are missing
       there are tokenized again.
    2. Walk: the draft model generates its most likely tokens, as long as they are the beginning of
       a cached n-gram.
    3. Compute q. A shared token has the probability that the draft model gives it. An n-gram along
       the walk has the product of its tokens' probabilities. This product is subtracted from the
       probability of the longest other n-gram that begins this one. Without such an n-gram, it is
       subtracted from the probability of the first token of the walk.
    4. Draw a token from q, and drop the KV entries after this token. Repeat from step 2 until
       `length` tokens are drafted.
    5. (engine) One target forward over the last committed token and the draft; verify; commit.
    6. If the draft vocabulary lacks a committed token, add its n-gram to the cache.
    """

    name: ClassVar[str] = "omnidraft"
    family: ClassVar[str] = "a draft model with any tokenizer"
    proposed_in: ClassVar[tuple[str, ...]] = ("ramakrishnan2025omnidraft",)
    Params: ClassVar[type[OmniDraftParams]] = OmniDraftParams
    params: OmniDraftParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    any_vocabulary: ClassVar[bool] = True
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def start(self, session: Session) -> None:
        """Prefill the draft model with the prompt, tokenized with its own tokenizer."""
        self.model, self.text = session.draft(), Transcript(session, session.draft())
        self.translation, self.drafted = self.text.translation, list[int]()
        self.runs: NgramCache = session.memory.setdefault("runs", NgramCache(self.params.memory))
        self.runs.add_text(session.tokens(), self.translation.spell_in_draft)
        if self.text.remaining > 0:
            self.model.forward(self.text.pending_tokens(), self.text.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 4 of the class docstring."""
        # Step 1: Translate the committed tokens into the draft model's vocabulary.
        self.text.follow(session.tokens())
        picks, x, state, remaining = (
            list[Pick](),
            self.text.pending_tokens(),
            self.text.state,
            self.text.remaining,
        )
        self.drafted, outs, fed = [], list[ModelOutput](), 0
        while len(picks) < min(self.params.length, limit) and len(self.drafted) < remaining:
            # Step 2: Collect the draft model's distributions before the walk and after each token
            # of the walk.
            outs = [self.model.forward(x, state) if x.ids.numel() else outs[fed]]
            begin, walk, node = state.length(), list[int](), self.runs.trie
            while node and len(self.drafted) + len(walk) < remaining:
                w = host.number(outs[-1].rows[-1].argmax())
                node = node.get(w, {})
                if not self.runs.has_children(node):
                    break
                walk.append(w)
                outs.append(self.model.forward(self._ids([w]), state))
            # Steps 3 and 4: Draw a token from q, and drop the KV entries after this token.
            picks.append(session.pick(self._distribution(walk, outs), len(picks)))
            run = self.runs.find_ngram(host.number(picks[-1][0]), self.translation.spell_in_draft)
            fed = next((at for at, w in enumerate(walk) if run[at : at + 1] != [w]), len(walk))
            state.rollback(0, begin + fed)
            self.drafted, x = [*self.drafted, *run], self._ids(run[fed:])
        return session.chain_of_picks(picks)

    def _distribution(self, walk: list[int], outs: list[ModelOutput]) -> ModelOutput:
        """Return the logits of q (step 3 of the class docstring)."""
        if not walk:
            return self.translation.restrict_to_shared(outs[0])
        distributions = [out.rows[-1].double().softmax(-1) for out in outs]
        q = (
            self.translation.restrict_to_shared(
                ModelOutput(distributions[0].log()[None, None], outs[0].hidden)
            )
            .rows[0]
            .exp()
        )
        node, chance, longest = (
            self.runs.trie,
            q.new_ones(()),
            self.translation.draft_to_target.get(walk[0]),
        )
        for w, before, after in zip(walk, distributions, distributions[1:], strict=False):
            node, chance = node[w], chance * before[w]
            longest = node.get(NgramCache.END, longest)
            ends, tokens = self.runs.find_completions(node)
            taken = chance * after[self._ids(ends).ids[0]]
            q[self._ids(tokens).ids[0]] = taken
            if longest is not None:
                q[longest] -= taken.sum()
        return ModelOutput(q.clamp_min(0).log().to(outs[0].rows.dtype)[None, None], outs[0].hidden)

    def _ids(self, ids: list[int]) -> Tokens:
        return Tokens(host.ids(ids, self.translation.device)[None])

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Update the translated text and the n-gram cache (steps 1 and 6 of the class
        docstring).
        """
        self.text.follow(session.tokens(), self.drafted)
        self.runs.add_text(outcome.committed, self.translation.spell_in_draft)
