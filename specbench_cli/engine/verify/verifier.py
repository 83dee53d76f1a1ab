"""Verifier of a session, which accepts or rejects draft tokens from the target's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.draft_validator import DraftValidator, check_rows
from specbench_cli.engine.models.meter import Meter
from specbench_cli.engine.scoring import Scoring
from specbench_cli.engine.sequence import RecordedOutput, Text
from specbench_cli.engine.step_log import StepLog
from specbench_cli.engine.types import Draft, Outcome
from specbench_cli.engine.verify import decide, ranking
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.engine.verify.choosing import Chooser
from specbench_cli.engine.verify.decide import relaxed_mask
from specbench_cli.engine.verify.processor import RequestProcessor
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import build_tree
from specbench_cli.engine.verify.weakened_prompt import WeakenedPromptReader
from specbench_cli.errors import MethodFault


class Verifier:
    """Verifier of the drafts of one session.

    Args:
        prompt_id: Id of the prompt, for messages.
        text: The text that the drafts continue.
        chooser: The object that knows the decoding rule.
        validator: Validator of the drafts.
        processing: Logits processor of the run. None leaves the logits unchanged.
        meter: Trace of the forwards, with the latest logits of the draft models.
        place: Index of the sequence in its batch. None for a sequence that is decoded alone.
        step_log: Record of the verified drafts.
        recording: Recorded output, whose tokens replace the target's choices in a replay. None
            means that the target decides.

    Attributes:
        scoring: The target's forwards.
        weakened: Object that runs the target on the weakened prompt. None without contrastive
            decoding.
        rows: The target's logits for the last verified draft. None before the first draft.
    """

    scoring: Scoring

    def __init__(
        self,
        prompt_id: str,
        text: Text,
        chooser: Chooser,
        validator: DraftValidator,
        *,
        processing: RequestProcessor | None,
        meter: Meter,
        place: int | None,
        step_log: StepLog,
        recording: RecordedOutput | None,
    ) -> None:
        self._prompt_id, self._text, self._chooser, self._validator = (
            prompt_id,
            text,
            chooser,
            validator,
        )
        self._sampling: Sampling = chooser.sampling
        self._processing, self._meter, self._place = processing, meter, place
        self._step_log, self._recording = step_log, recording
        self.weakened: WeakenedPromptReader | None = None
        self.rows: Tensor | None = None

    def verify(self, draft: Draft, rows: Tensor, accept: AcceptRule | None = None) -> Outcome:
        """Accept or reject the tokens of a draft, from the target's logits, as `Session.verify`
        does.
        """
        if rows.shape[0] != draft.nodes + 1:
            self._validator.run(check_rows, draft, rows.shape[0])
        self.rows = rows
        self._step_log.record_verified(draft)
        if accept is None or accept.is_exact:
            return self.decide(draft, rows)
        self._check_rule(accept)
        return self.decide(draft, rows, accept)

    def decide(self, draft: Draft, rows: Tensor, accept: AcceptRule | None = None) -> Outcome:
        """Accept or reject the tokens of a draft. After the prompt, choose the first token without
        a draft.
        """
        tree = None if draft.parents is None else build_tree(draft.parents, draft.order)
        random, drafters = self._chooser.random, self._meter.pop_largest_logits(self._place)
        rows = self._chooser.align(rows)
        rows = self._process(draft, rows)  # also in a replay, because it takes time
        if self._recording is not None:
            levels = range(rows.shape[0]) if tree is None else (0, *tree.depths)
            choices = self._recording.choices(self._text.position, levels)
            outcome, last = decide.decide_by_choice(draft, tree, choices, drafters=drafters)
        elif self._sampling.draws:
            p = self._chooser.warp(rows)
            passes = relaxed_mask(
                accept, p, draft, tree, random, features=self.scoring.last_forward_features
            )
            try:
                outcome, last = decide.decide_by_draw(
                    draft, tree, p, random, self._sampling.rule, passes, drafters
                )
            except ArithmeticError as fault:
                self._validator.inspect(draft)
                raise self._with_step(fault) from None
        else:
            depths = None if tree is None else (0, *tree.depths)
            scores = self._chooser.scores(rows, self._text.position, depths)
            passes = None
            if accept is not None:
                passes = relaxed_mask(
                    accept,
                    self._distributions(rows),
                    draft,
                    tree,
                    random,
                    scores=scores,
                    features=self.scoring.last_forward_features,
                )
            try:
                choices = ranking.argmax(scores)
                outcome, last = decide.decide_by_choice(
                    draft, tree, choices, passes, scores, drafters
                )
            except ArithmeticError as fault:
                raise self._with_step(fault) from None
        self._text.last_choice = outcome.committed[-1], last
        return outcome

    def _process(self, draft: Draft, rows: Tensor) -> Tensor:
        """Apply the run's contrastive decoding and logits processor to the logits."""
        if self.weakened is not None:
            rows = self.weakened.apply_contrast(draft, rows)
        if self._processing is None:
            return rows
        try:
            return self._processing(
                rows, self._text.output, host.numbers(draft.tokens), draft.parents
            )
        except ArithmeticError as fault:
            raise self._with_step(fault) from None

    def _with_step(self, fault: ArithmeticError) -> ArithmeticError:
        """Return the error with the prompt and the step added to its message.

        The error is about non-finite numbers. The prefill is step 0.
        """
        at = f"{self._prompt_id}, step {self._text.steps}"
        return ArithmeticError(f"{at}: {fault}")

    def _distributions(self, rows: Tensor) -> Tensor:
        """Return the target's distributions [..., V] that the accept rule gets.

        Under greedy decoding they are the softmax of the logits. Otherwise they include
        temperature, top-k and top-p.
        """
        if self._sampling.rule != "greedy":
            return self._chooser.warp(rows)
        return rows.to(torch.promote_types(rows.dtype, torch.float32)).softmax(-1)

    def _check_rule(self, accept: AcceptRule) -> None:
        if self._recording is not None:
            why, instead = "this run replays tokens", "leave out --verify replay"
        elif self._sampling.rule == "block":
            why, instead = (
                "block verification decides whole blocks",
                "use --verify rejection or coupled",
            )
        elif self._processing is not None:
            why, instead = "it may keep some that the grammar forbids", "leave out --grammar"
        else:
            return
        raise MethodFault(
            f"accept rule {accept.name!r} decides on single tokens, and {why}",
            f"{instead}; or leave out the accept rule",
        )
