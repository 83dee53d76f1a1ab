"""SAM-Decoding: drafts from earlier text, found with a suffix automaton.

Yuxuan Hu, Ke Wang, Xiaokang Zhang, Fanjin Zhang, Cuiping Li, Hong Chen, Jing Zhang: SAM Decoding:
Speculative Decoding via Suffix Automaton, ACL 2025, arXiv:2411.10666.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from methods.eagle.head import EagleHead
from methods.sam.automaton import SuffixAutomaton as Automaton
from specbench_cli.api import (
    ArtifactSpec,
    Draft,
    Field,
    Levels,
    Method,
    MethodParams,
    Outcome,
    Pick,
    Session,
    Tokens,
    host,
)


class SamParams(MethodParams):
    """Parameters of `Sam`."""

    length: int = Field(
        39,
        ge=1,
        description="maximum number of draft tokens per step (n_predicts - 1 in the authors' code)",
    )
    factor: float = Field(
        4,
        ge=0,
        description="beside=nothing: maximum number of draft tokens per matched token (alpha)",
    )
    beside: Literal["nothing", "draft", "eagle"] = Field(
        "nothing",
        description="what drafts when the match is too short: nothing, a draft model, or"
        " EAGLE's head",
    )
    head: str = Field(
        "auto",
        description="beside=eagle: draft head: auto (the default head of the target), a folder"
        " or a hub id",
    )
    threshold: int = Field(
        5, ge=1, description="beside=draft or eagle: minimum length of a match, in tokens"
    )
    bias: int = Field(
        5,
        ge=0,
        description="beside=draft or eagle: number of tokens by which a match in earlier"
        " outputs must be longer than one in the text",
    )
    drafted: int = Field(
        5,
        ge=1,
        description="beside=draft or eagle: number of tokens that the model drafts per step",
    )
    scope: Literal["run", "prompt"] = Field(
        "run",
        description="draft from earlier outputs of the run as well, or only from the text of"
        " this prompt",
    )
    memory: int = Field(
        100_000,
        ge=0,
        description="maximum number of tokens of earlier outputs; when it is reached, all are"
        " dropped",
    )


class Sam(Method):
    """SAM-Decoding: drafts the tokens after the longest earlier match, found with suffix automata.

    Lossless because the draft, and the choice whether a model drafts instead, depend only on
    earlier tokens. Retrieved tokens and the tokens of EAGLE's head are not drawn at random. Tokens
    of a draft model are verified with the distribution from which they were drawn.
    Differs from the authors' code: the second automaton covers earlier outputs of the run and
    drafts a chain. In the paper, it covers a fixed corpus. A chain ends where its source text ends,
    and is not padded. The model is any draft model, or EAGLE's head with a chain instead of
    EAGLE-2's tree. The text of the first automaton includes the last committed token; the text of
    the authors' automaton ends before it. The authors' `n_predicts` counts this token, so `length`
    39 equals `n_predicts` 40. Without a draft model, `bias` does not apply, as in the authors'
    script.

    With `scope=run`, data from earlier prompts is kept. The speed of a prompt then depends on
    earlier prompts, but its output does not. An automaton has at most 2 states and 3 transitions
    per token. `memory` limits the tokens of earlier outputs.

    One step:
    1. For each committed token: extend the match in the text and the match in earlier outputs. Add
       the token to the text's automaton only afterwards, so that a suffix does not match itself.
    2. Take the longer match. If both are equally long, take the match in the text. With a draft
       model or EAGLE's head, a match in earlier outputs counts as `bias` tokens shorter. If the
       match is shorter than `threshold`, the model drafts `drafted` tokens instead.
    3. Draft the `length` tokens after the first occurrence of the match. Without a draft model,
       draft at most `factor` tokens per matched token. With a draft model, `length` tokens must
       follow in the text. If fewer follow, use the longest shorter suffix that `length` tokens
       follow.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    5. When the output ends, add the output to the second automaton.
    """

    name: ClassVar[str] = "sam"
    family: ClassVar[str] = "earlier text"
    proposed_in: ClassVar[tuple[str, ...]] = ("hu2024sam",)
    Params: ClassVar[type[MethodParams]] = SamParams
    params: SamParams
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    @property
    def requirements(self) -> frozenset[str]:
        """Assets that the method needs: a draft model, a head, or nothing."""
        words = {"nothing": (), "draft": ("draft",), "eagle": ("head",)}
        return frozenset(words[self.params.beside])

    def artifacts(self) -> tuple[ArtifactSpec, ...]:
        """Return EAGLE's head if the parameters select it. Otherwise return nothing."""
        head = ArtifactSpec(EagleHead, self.params.head)
        return (head,) if self.params.beside == "eagle" else ()

    def start(self, session: Session) -> None:
        """Create the automaton of this text, and prefill the draft model or head.

        The automaton of earlier outputs comes from the run's memory.
        """
        self.text_automaton, self.num_read = Automaton(), 0
        self.memory = session.memory if self.params.scope == "run" else {}
        self.output_automaton: Automaton = self.memory.setdefault("outputs", Automaton())
        self.text_match = self.output_match = (
            0,
            0,
        )  # longest matches in the text and in earlier outputs
        self._extend_matches(session)
        if self.params.beside == "eagle":
            self.levels = Levels.of_head(session, *self.artifacts(), nodes=self.params.drafted)
        elif self.requirements:
            self.model = session.draft()
            self.state = session.new_state(self.model)
            self.model.forward(session.pending_tokens(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        self._extend_matches(session)
        params, (_, text_length), (_, output_length) = (
            self.params,
            self.text_match,
            self.output_match,
        )
        if self.requirements:
            max_tokens, output_length = params.length, output_length - params.bias
            if max(text_length, output_length) < params.threshold:
                draft_chain = (
                    self._draft_with_eagle if params.beside == "eagle" else self._draft_with_model
                )
                return draft_chain(session, min(params.drafted, limit))
        else:
            max_tokens = min(params.length, int(params.factor * max(text_length, output_length)))
        if text_length >= output_length:
            min_tokens = max_tokens if self.requirements else 0
            return session.chain(
                self.text_automaton.get_continuation(
                    self.text_match, max_tokens, min_tokens=min_tokens
                )[:limit]
            )
        return session.chain(
            self.output_automaton.get_continuation(self.output_match, max_tokens)[:limit]
        )

    def _draft_with_model(self, session: Session, n: int) -> Draft:
        """Draft a chain with the draft model, as in standard speculative sampling."""
        x, picks = session.pending_tokens(self.state.length()), list[Pick]()
        while len(picks) < n:
            picks.append(session.pick(self.model.forward(x, self.state), len(picks)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def _draft_with_eagle(self, session: Session, n: int) -> Draft:
        """Draft a chain with EAGLE's head, one token per forward."""
        if n < 1:
            return session.chain(())
        levels, tokens = self.levels, list[host.Ids]()
        out = levels.begin(session.pending_features(levels.state.length()))
        while len(tokens) < n:
            if tokens:
                out = levels.feed(tokens[-1], (0,))
            children, _ = session.branch(out.rows, 1, how="deterministic", ahead=len(tokens))
            tokens.append(children[0])
        levels.drop()
        return session.chain(host.concatenate(tokens))

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Drop the model's KV entries of rejected tokens.

        Store a finished output (step 5 of the class docstring).
        """
        if self.params.beside == "draft":
            self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))
        if session.finish is not None:
            if len(self.output_automaton.text) + len(session.output()) >= self.params.memory:
                self.output_automaton = self.memory["outputs"] = Automaton()
            self.output_automaton.add(session.output()[: self.params.memory])

    def _extend_matches(self, session: Session) -> None:
        """Update both matches with the new committed tokens: step 1 of the class docstring."""
        if (
            self.output_automaton is not self.memory["outputs"]
        ):  # another request of the batch replaced it
            self.output_automaton, self.output_match = self.memory["outputs"], (0, 0)
        for token in session.tokens()[self.num_read :]:
            self.text_match = self.text_automaton.follow(self.text_match, token)
            self.output_match = self.output_automaton.follow(self.output_match, token)
            self.text_automaton.append(token)
        self.num_read = len(session.tokens())
