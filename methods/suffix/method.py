"""SuffixDecoding: drafts from earlier text, found with suffix trees.

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
    """SuffixDecoding: drafts from suffix trees of this text and of earlier outputs.

    A pattern is a suffix of the text that occurred before. A longer pattern gives a longer draft.

    Lossless because the draft depends only on earlier tokens. Draft tokens are not drawn at random.
    A draft token is accepted with the probability that the target gives it.
    Differs from the authors' code (ArcticInference): patterns up to the whole text are tried. The
    authors' code excludes the longest pattern. Among equally frequent continuations the first is
    drafted. The memory size is counted in tokens, not in outputs. As in the authors' code, the
    global tree also contains unfinished outputs, including the current one. With `active` off, the
    global tree contains only finished outputs. Then decoding takes 0.4 to 1.4% more steps on
    specbench's tasks.

    With `scope=run` the global tree persists across prompts, so the speed of a prompt depends on
    earlier prompts. The trees have at most 2 nodes per stored token, and `depth` additional nodes
    per output.

    One step:
    1. Add the committed tokens to the per-request tree, which contains the prompt and the output,
       and to the global tree, which contains outputs. Find the patterns in both trees.
    2. For each pattern, take its most frequent continuation as a chain or a tree, with at most
       `factor` tokens per token of the pattern. The score of a token is the relative frequency of
       its path.
    3. Draft the continuation with the highest total score, which is the expected number of accepted
       tokens. On a tie prefer the per-request tree, then the longer pattern.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    5. Report to the global tree which earlier output gave accepted tokens. When the output is
       finished, evict earlier outputs if the memory is full.
    """

    name: ClassVar[str] = "suffix"
    family: ClassVar[str] = "earlier text"
    proposed_in: ClassVar[tuple[str, ...]] = ("oliaro2025suffix",)
    Params: ClassVar[type[MethodParams]] = SuffixParams
    params: SuffixParams
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"
    source: int | None = None  # number of the earlier output from which the draft was taken

    def start(self, session: Session) -> None:
        """Create the per-request tree, and take the global tree from the run's memory."""
        params = self.params
        self.text_tree, self.num_read = SuffixTree(params.depth), 0
        memory = session.memory if params.scope == "run" else {}
        new = SuffixTree(params.depth, params.eviction)
        self.output_tree: SuffixTree = memory.setdefault("outputs", new)
        self.open_output = self.output_tree.open() if self._active else None
        self.output_start = len(session.tokens()) - len(session.output())
        self.output_matches: list[tuple[int, int]] = []  # patterns, see `_update_trees`
        self.evictions = self.output_tree.evictions
        if params.shape == "tree":
            session.reserve(params.nodes)
        self._update_trees(session)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        self._update_trees(session)
        params, tokens, parents, best = self.params, list[int](), list[int](), 0.0
        self.source = None
        output_matches = self.output_matches + (
            self.open_output.repeated if self.open_output else []
        )
        for tree, matches in (
            (self.text_tree, self.text_tree.repeated),
            (self.output_tree, output_matches),
        ):
            for match in matches:  # longest pattern first
                max_tokens = min(int(params.factor * match[1] + params.offset + 1e-6), params.nodes)
                if max_tokens <= best:  # a token scores at most 1, and shorter patterns draft less
                    break
                if params.shape == "chain":
                    found = tree.find_path(match, min(max_tokens, limit), params.least)
                else:
                    found = tree.find_tree(match, max_tokens, params.least, limit)
                if found[2] > best:
                    tokens, parents, best = found
                    self.source = tree.find_sequence(match)  # None in the per-request tree
        if params.shape == "chain":
            return session.chain(tokens)
        return session.tree(tokens, tuple(parents))

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 5 of the class docstring."""
        self.output_tree.use(self.source if self.source is not None and outcome.path else None)
        if self.open_output:
            self._update_trees(session)  # before other requests of the batch draft from this output
        if session.finish is not None:
            if self.open_output is None:
                self.open_output = self.output_tree.open()
                for token in session.output():
                    self.output_tree.append(token, self.open_output)
            self.output_tree.close(self.open_output)
            self.open_output = None
            self.output_tree.evict(self.params.memory)

    @property
    def _active(self) -> bool:
        """True if the method also drafts from unfinished outputs."""
        return self.params.active and self.params.scope == "run" and self.params.memory > 0

    def _update_trees(self, session: Session) -> None:
        """Add new committed tokens to both trees and find the patterns: step 1 of the class
        docstring.

        The global tree itself tracks patterns that begin in this output (`OpenSequence.repeated`).
        `output_matches` contains longer patterns, which begin in the prompt.
        """
        text = session.tokens()
        if self.evictions != self.output_tree.evictions:  # by another request of the batch
            self.output_matches, self.evictions = [], self.output_tree.evictions
            for token in text[max(0, self.num_read - self.params.depth) : self.num_read]:
                self.output_matches = self.output_tree.follow(self.output_matches, token)
            self._drop_shorter(self.num_read)
        for place, token in enumerate(text[self.num_read :], self.num_read):
            self.text_tree.append(token)
            self.output_matches = self.output_tree.follow(self.output_matches, token)
            if self.open_output and place >= self.output_start:
                self.output_tree.append(token, self.open_output)
                self._drop_shorter(place + 1)
        self.num_read = len(text)

    def _drop_shorter(self, end: int) -> None:
        """Drop patterns that begin in the output. The global tree itself tracks these patterns."""
        if self.open_output:
            self.output_matches = [
                match for match in self.output_matches if match[1] > end - self.output_start
            ]
