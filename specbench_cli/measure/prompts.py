"""Prompts of a repeat, built from questions, and outputs that must be known before decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specbench_cli.engine.request import Request
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import PromptError, UsageError
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.record_builder import REPLAY
from specbench_cli.measure.stored_outputs import StoredOutputs
from specbench_cli.plan.plan import Plan
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import BASELINE
from specbench_cli.tasks.schema import Question


class KnownOutput(NamedTuple):
    """Vanilla's output for a prompt. Some methods and runs need it before they decode the prompt.

    recording: Tokens that replace the target's choices (`--verify replay`). None without replay.
    reference: Tokens that upper-bound methods may read (`Method.upper_bound`). None without such
        methods.
    """

    recording: list[int] | None
    reference: list[int] | None


class PromptBuilder:
    """Builder of prompts from questions. It stores new prompts in the run's folder.

    Args:
        plan, bench: The plan of the run, and its loaded models.
        run_dir: Folder of the run.
        stored_outputs: Prompts and outputs that are already stored in the run's folder.
        sampling: Sampling settings of the run.
    """

    def __init__(
        self,
        plan: Plan,
        bench: Bench,
        run_dir: RunDir,
        stored_outputs: StoredOutputs,
        sampling: Sampling,
    ) -> None:
        self._plan, self._bench, self._run_dir = plan, bench, run_dir
        self._stored_outputs, self._sampling = stored_outputs, sampling
        self._has_upper_bound = any(
            method_run.method.upper_bound for method_run in plan.method_runs
        )

    def build(
        self, question: Question, turn: int, answers: Sequence[Sequence[int]]
    ) -> tuple[Prompt, PromptError | None]:
        """Return the prompt of a turn, and the error if the target cannot decode the prompt.

        A prompt that is already stored is returned unchanged. So all repeats use the prompts of the
        first repeat. A prompt has no token ids if the chat template or the tokenizer failed.

        Args:
            question: The question.
            turn: Number of the turn, from 1.
            answers: Vanilla's answers to the earlier turns.
        """
        known = self._stored_outputs.prompts.get((question.prompt_id, turn))
        ids: list[int] = [] if known is None else known.ids
        fault = None
        try:
            ids = ids or self._bench.encode_prompt(question, answers)
            name = f"{question.prompt_id}, turn {turn},"
            self._bench.check_fits(name, len(ids), self._plan.max_new_tokens(question))
        except PromptError as found:
            fault = found
        if known is not None:
            return known, fault
        prompt = Prompt(
            prompt_id=question.prompt_id,
            cluster=question.cluster,
            task=question.task,
            family=question.family,
            category=question.category,
            turn=turn,
            text=question.turns[turn - 1],
            ids=ids,
        )
        self._run_dir.append_prompts([prompt])
        self._stored_outputs.prompts[question.prompt_id, turn] = prompt
        return prompt, fault

    def find_known_output(self, request: Request, number: int) -> KnownOutput:
        """Return vanilla's output for a request, for a replay and for upper-bound methods.

        If neither needs it, the result is empty.

        Args:
            request: The request.
            number: Number of the repeat.
        """
        replays = self._plan.config.verify == REPLAY
        return KnownOutput(
            self._vanilla_output(request, number) if replays else None,
            self._vanilla_output(request, number) if self._has_upper_bound else None,
        )

    def _vanilla_output(self, request: Request, number: int) -> list[int]:
        """Return vanilla's output for a request. If it is not stored, decode it without timing.

        Raises:
            UsageError: the target's logits are not finite, so there is no output.
        """
        known = self._stored_outputs.vanilla.get((request.prompt_id, request.turn, number))
        if known is not None:
            return known
        (vanilla,) = (
            method_run.method
            for method_run in self._plan.method_runs
            if method_run.label == BASELINE
        )
        session = Session(self._bench.workspace, request, self._sampling, pass_=number)
        try:
            for _ in vanilla.generate(session):
                pass
        except ArithmeticError as fault:
            target = self._plan.target.label
            raise UsageError(
                f"{target} generates no output that other methods can replay: {fault}",
                "its weights contain nan or inf, or overflow in this dtype: choose --dtype float32"
                " or another --target",
            ) from fault
        return list(session.output())
