"""Speculative Thinking: the target takes over where the draft model's reasoning affirms or doubts
itself.

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
    """Accept rule that accepts everything that the draft model writes."""

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
        """Return 1 if the text affirms, -1 if it doubts, and 0 if it does neither.

        The text affirms if it contains more words of `affirm` than of `reflect` and `verify`. Any
        other text with such words doubts. A word also counts inside a longer word.
        """
        lists: Sequence[Sequence[str]] = (self.affirm, self.reflect, self.verify)
        yes, *no = (sum(text.lower().count(word) for word in words) for words in lists)
        return 0 if not yes + sum(no) else 1 if yes > sum(no) else -1


class SpeculativeThinking(Method):
    """Speculative Thinking: the draft model writes; the target takes over at affirmation or doubt.

    Lossy: the purpose of the method is to improve the answers of the draft model. The text of the
    draft model is committed unchanged. With `writer=target` the target writes the whole output.
    Differs from the authors' code: the target's text always replaces the probe. A probe is a short
    text that the draft model writes at the start of a paragraph. Probes and the target's texts end
    with their paragraph. Dropped tokens of probes count as drafted.

    One step:
    1. The draft model writes a paragraph.
    2. After `limit` doubts the target writes a summary: the text `recap` and up to `excess` tokens.
    3. The draft model writes a probe of `probe` tokens. If the probe neither affirms nor doubts,
       drop it and continue with step 1.
    4. Otherwise the target writes text in place of the probe. If this text verifies earlier
       reasoning, the target writes `checked` more tokens.
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
        """Rule that accepts every paragraph of the draft model.

        None if the draft model never writes.
        """
        return AssistedRule() if self.params.writer == "draft" else None

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, one paragraph after another."""
        params, accept_all, random_rule = (
            self.params,
            AssistedRule().judge(1.0),
            self.params.random_rule,
        )
        doubts, limit, excess = 0, params.limit, params.excess
        segments = Segments(session, params.delimiter, params.cap)
        session.prefill()
        while session.finish is None:
            if params.writer == "target":
                yield from segments.write_with_target(params.length)
                segments.begin()
                continue
            # Step 1: The draft model writes a paragraph.
            draft = segments.draft()
            yield segments.verify_and_commit(draft, session.score(draft), accept_all, grade=1.0)
            if not segments.ends_with_delimiter:
                continue
            if doubts >= limit:
                # Step 2: After too many doubts the target writes a summary. The limit is higher for
                # the next summary.
                yield segments.insert_tokens(
                    segments.vocabulary.encode(params.recap.encode()), accept_all, grade=1.0
                )
                segments.begin()
                yield from segments.write_with_target(params.length, excess)
                doubts, limit, excess = 0, min(limit + 5, 30), min(excess + 25, 200)
                continue
            # Step 3: The draft model writes a probe. The probe is dropped if it neither affirms nor
            # doubts.
            probe = segments.draft(params.probe)
            text = segments.vocabulary.decode(host.numbers(probe.tokens)).decode(errors="replace")
            is_calm = not params.polarity(text) and not params.always
            if random_rule is not None:
                is_calm = random_rule.random_grade(session.random, session.verified_logits()) > 0
            if is_calm:
                segments.discard(probe, spans=1, stood=1)
                continue
            # Step 4: Otherwise the target writes text in place of the probe, and more tokens if
            # this text verifies earlier reasoning.
            yield segments.verify_and_commit(probe, session.score(probe), takeovers=1, spans=1)
            yield from segments.write_with_target(
                params.length, params.probe - len(segments.open_ids)
            )
            text = segments.vocabulary.decode(segments.open_ids).decode(errors="replace")
            doubts += params.polarity(text) < 0
            if any(word in text.lower() for word in params.verify):
                yield from segments.write_with_target(params.length, params.checked)
