"""Speculative Thinking: the draft reasons; the target takes over where it affirms or doubts.

Wang Yang, Xiang Yue, Vipin Chaudhary, Xiaotian Han: Speculative Thinking: Enhancing Small-Model
Reasoning with Large Model Guidance at Inference Time, COLM 2025, arXiv:2504.12329.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from specbench_cli.api import (
    Field,
    Method,
    SegmentParams,
    SegmentRule,
    Segments,
    Session,
    Step,
    WordList,
    host,
)


@dataclass(frozen=True, kw_only=True)
class AssistedRule(SegmentRule):
    """Accept rule: accepts everything that the draft writes in its turn."""

    name: ClassVar[str] = "assisted"

    def accepts(self, grade: float) -> bool:
        return True


class SpeculativeThinkingParams(SegmentParams):
    """Parameters of `SpeculativeThinking`."""

    writer: Literal["draft", "target"] = Field(
        "draft", description="model that writes the text; target makes the method lossless"
    )
    probe: int = Field(
        20,
        ge=1,
        description="number of tokens of a probe, and of the target's takeover that replaces it",
    )
    checked: int = Field(
        125,
        ge=0,
        description="number of further tokens that the target writes if its takeover verifies"
        " an earlier step",
    )
    excess: int = Field(
        125, ge=0, description="maximum number of tokens of a takeover after too many doubts"
    )
    limit: int = Field(15, ge=1, description="number of doubts after which the target sums up")
    affirm: WordList = Field(
        ("yeah", "yes", "final answer", "confident"), description="words that affirm"
    )
    reflect: WordList = Field(
        ("wait", "alternatively", "hold on", "another"), description="words that express doubt"
    )
    verify: WordList = Field(
        ("verify", "think again", "recap", "check"),
        description="words that announce a verification",
    )
    recap: str = Field(
        "Let me check all of this.\n", description="text that is inserted before the target sums up"
    )
    always: bool = Field(False, description="let the target take over after every paragraph")
    length: int = Field(
        5,
        ge=0,
        description="number of tokens that the draft model drafts per step while the target writes",
    )

    def polarity(self, text: str) -> int:
        """Return 1 if a text affirms more than it doubts and verifies, else -1, or 0 without any of
        the words.

        The words are also found inside other words.
        """
        lists: Sequence[Sequence[str]] = (self.affirm, self.reflect, self.verify)
        yes, *no = (sum(text.lower().count(word) for word in words) for words in lists)
        return 0 if not yes + sum(no) else 1 if yes > sum(no) else -1


class SpeculativeThinking(Method):
    """Speculative Thinking: the draft writes; the target takes over where it affirms or doubts.

    Lossy: it makes a small model better, not the target faster. The draft's text is committed
    unchanged. With `writer=target` the draft never writes, and the output is the target's.
    Differs from the authors' code: the target's text always replaces the probe. Probes and
    takeovers end with their paragraph. Dropped tokens are counted.

    One step:
    1. The draft model writes a paragraph.
    2. After `limit` doubts the target sums up, with `recap` and up to `excess` tokens.
    3. The draft writes a probe of `probe` tokens. If it neither affirms nor doubts, drop the probe.
    4. Otherwise the target writes instead of the probe, and `checked` more tokens if it verifies.
    """

    name: ClassVar[str] = "speculative-thinking"
    family: ClassVar[str] = "a draft model, a segment of text at a time"
    proposed_in: ClassVar[tuple[str, ...]] = ("yang2025speculativethinking",)
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[SpeculativeThinkingParams]] = SpeculativeThinkingParams
    params: SpeculativeThinkingParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    bonus: ClassVar[bool] = False
    exact_params: ClassVar[Mapping[str, Any]] = {"writer": "target"}
    paper_params: ClassVar[Mapping[str, Any]] = {"delimiter": "\n\n"}

    @property
    def accept(self) -> SegmentRule | None:
        """Return the rule that accepts a whole paragraph, or None if the draft never writes."""
        return AssistedRule() if self.params.writer == "draft" else None

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, one paragraph after another."""
        params, stands, coin = self.params, AssistedRule().judge(1.0), self.params.random_rule
        doubts, limit, excess = 0, params.limit, params.excess
        spans = Segments(session, params.delimiter, params.cap)
        session.prefill()
        while session.finish is None:
            if params.writer == "target":
                yield from spans.write_with_target(params.length)
                spans.begin()
                continue
            # 1. The draft writes a paragraph.
            draft = spans.draft()
            yield spans.verify_and_commit(draft, session.score(draft), stands, grade=1.0)
            if not spans.ends_with_delimiter:
                continue
            if doubts >= limit:
                # 2. After too many doubts the target sums up. The limit is higher the next time.
                yield spans.insert_tokens(
                    spans.vocabulary.encode(params.recap.encode()), stands, grade=1.0
                )
                spans.begin()
                yield from spans.write_with_target(params.length, excess)
                doubts, limit, excess = 0, min(limit + 5, 30), min(excess + 25, 200)
                continue
            # 3. The draft writes a probe, which is dropped if it neither affirms nor doubts.
            probe = spans.draft(params.probe)
            said = spans.vocabulary.decode(host.numbers(probe.tokens)).decode(errors="replace")
            calm = not params.polarity(said) and not params.always
            if coin is not None:
                calm = coin.random_grade(session.random, session.verified_logits()) > 0
            if calm:
                spans.discard(probe, spans=1, stood=1)
                continue
            # 4. Otherwise the target writes in its place, and more if it verifies.
            yield spans.verify_and_commit(probe, session.score(probe), takeovers=1, spans=1)
            yield from spans.write_with_target(params.length, params.probe - len(spans.open_ids))
            said = spans.vocabulary.decode(spans.open_ids).decode(errors="replace")
            doubts += params.polarity(said) < 0
            if any(word in said.lower() for word in params.verify):
                yield from spans.write_with_target(params.length, params.checked)
