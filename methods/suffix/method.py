"""SuffixDecoding.

Gabriele Oliaro, Zhihao Jia, Daniel Campos, Aurick Qiao: SuffixDecoding: Extreme Speculative
Decoding for Emerging AI Applications, NeurIPS 2025, arXiv:2411.04975.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from methods.suffix.eviction import EvictionName
from methods.suffix.tree import SuffixTree
from specbench_cli.api import (
    Draft,
    Field,
    Method,
    MethodParams,
    Outcome,
    Session,
)


class SuffixParams(MethodParams):
    """Parameters of `Suffix`."""

    depth: int = Field(
        64,
        ge=2,
        description="maximum number of tokens of a string in the suffix trees (authors' code: 64)",
    )
    factor: float = Field(
        1.0,
        ge=0,
        description="maximum number of draft tokens per matched token (alpha; authors' code: 1)",
    )
    offset: float = Field(
        0.0, ge=0, description="number of draft tokens added to that maximum (authors' code: 0)"
    )
    nodes: int = Field(16, ge=1, description="maximum number of draft tokens per step")
    least: float = Field(
        0.1,
        gt=0,
        le=1,
        description="minimum probability of the path to a draft token (authors' code: 0.1)",
    )
    shape: Literal["chain", "tree"] = Field(
        "chain", description="draft one continuation (chain) or several (tree)"
    )
    scope: Literal["run", "prompt"] = Field(
        "run", description="draft from earlier outputs of the whole run, or of this prompt only"
    )
    active: bool = Field(
        True, description="scope=run: draft from unfinished outputs of the batch, too"
    )
    memory: int = Field(
        100_000, ge=0, description="maximum number of tokens of earlier outputs in the tree"
    )
    eviction: EvictionName = Field(
        "fifo", description="policy that chooses which output to remove when the memory is full"
    )


class Suffix(Method):
    """SuffixDecoding: suffix trees over this text and earlier outputs; a longer match drafts more.

    Exact because the draft depends only on the past. Its tokens are point masses, chosen without
    drawing, each accepted with the target's own probability of it.
    Differs from the authors' code (ArcticInference): matches up to the whole text are tried, which
    its loop leaves out. Of equally frequent continuations the first is drafted. Eviction counts
    tokens. As there, the second tree also contains unfinished outputs, including this one. The
    first tree also contains the prompt, so the two have different counts. With `active` off, an
    output enters the second tree only when it is finished: 0.4 to 1.4% more steps on our tasks.

    With scope `run` the second tree persists across prompts, so the speed of a prompt depends on
    earlier ones. The trees have at most 2 nodes per stored token, and `depth` more per output.

    One step:
    1. Add the committed tokens to the tree of this text with its prompt (the paper's per-request
       tree) and to the tree of outputs (the global tree). Find the suffixes of the text that occur
       in the tree of outputs.
    2. For each suffix that occurred before, take its most frequent continuation as a chain or a
       tree, at most `factor` tokens per matched token. Score each token by the frequency of its
       path.
    3. Draft the candidate with the highest total score, the expected number of accepted tokens. On
       a tie prefer the text's own tree, then the longer match.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    5. Report accepted drafts to the second tree. When the output is finished, evict by the policy.
    """

    name: ClassVar[str] = "suffix"
    family: ClassVar[str] = "earlier text"
    proposed_in: ClassVar[tuple[str, ...]] = ("oliaro2025suffix",)
    Params: ClassVar[type[MethodParams]] = SuffixParams
    params: SuffixParams
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"
    source: int | None = None  # the earlier output that the draft is from

    def start(self, session: Session) -> None:
        """Create a tree for the text and its prompt, and take over the tree of outputs."""
        params = self.params
        self.own, self.read = SuffixTree(params.depth), 0
        kept = session.memory if params.scope == "run" else {}
        new = SuffixTree(params.depth, params.eviction)
        self.outputs: SuffixTree = kept.setdefault("outputs", new)
        self.output = self.outputs.open() if self._active else None
        self.first = len(session.tokens()) - len(session.output())
        self.matches: list[tuple[int, int]] = []  # those that occur in `outputs`
        self.evictions = self.outputs.evictions
        if params.shape == "tree":
            session.reserve(params.nodes)
        self._read(session)

    def propose(self, session: Session, limit: int) -> Draft:
        """Carry out steps 1 to 3."""
        self._read(session)
        params, tokens, parents, best = self.params, list[int](), list[int](), 0.0
        self.source = None
        among = self.matches + (self.output.repeated if self.output else [])
        for tree, matches in ((self.own, self.own.repeated), (self.outputs, among)):
            for match in matches:  # the longest first
                most = min(int(params.factor * match[1] + params.offset + 1e-6), params.nodes)
                if most <= best:  # no token scores more than 1, and shorter matches draft less
                    break
                if params.shape == "chain":
                    found = tree.find_path(match, min(most, limit), params.least)
                else:
                    found = tree.find_tree(match, most, params.least, limit)
                if found[2] > best:
                    tokens, parents, best = found
                    self.source = tree.find_sequence(match)  # None for the text's own tree
        if params.shape == "chain":
            return session.chain(tokens)
        return session.tree(tokens, tuple(parents))

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Carry out step 5."""
        self.outputs.use(self.source if self.source is not None and outcome.path else None)
        if self.output:
            self._read(session)  # before others of the batch propose
        if session.finish is not None:
            if self.output is None:
                self.output = self.outputs.open()
                for token in session.output():
                    self.outputs.append(token, self.output)
            self.outputs.close(self.output)
            self.output = None
            self.outputs.evict(self.params.memory)

    @property
    def _active(self) -> bool:
        """Return True if the method drafts from unfinished outputs."""
        return self.params.active and self.params.scope == "run" and self.params.memory > 0

    def _read(self, session: Session) -> None:
        """Carry out step 1, and set `matches`.

        The tree of outputs tracks the suffixes inside this output (`OpenSequence.ends`). `matches`
        are the longer suffixes, which include tokens of the prompt.
        """
        text = session.tokens()
        if self.evictions != self.outputs.evictions:  # another sequence of the batch evicted
            self.matches, self.evictions = [], self.outputs.evictions
            for token in text[max(0, self.read - self.params.depth) : self.read]:
                self.matches = self.outputs.follow(self.matches, token)
            self._drop_shorter(self.read)
        for place, token in enumerate(text[self.read :], self.read):
            self.own.append(token)
            self.matches = self.outputs.follow(self.matches, token)
            if self.output and place >= self.first:
                self.outputs.append(token, self.output)
                self._drop_shorter(place + 1)
        self.read = len(text)

    def _drop_shorter(self, end: int) -> None:
        """Drop the matches inside the output, which the tree of outputs tracks."""
        if self.output:
            self.matches = [match for match in self.matches if match[1] > end - self.first]
