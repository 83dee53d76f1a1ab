"""Outputs that are already stored in a run's folder. A repeat measures only the missing outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from specbench_cli.plan.method_run import MethodRun
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import BASELINE, RecordKey
from specbench_cli.tasks.schema import Question


@dataclass
class StoredOutputs:
    """Keys, outputs and prompts that are stored in the folder of a run.

    done: Keys of all records.
    vanilla: Token ids of vanilla's outputs, by prompt id, turn and repeat.
    prompts: Prompts, by prompt id and turn.
    """

    done: set[RecordKey] = field(default_factory=set)
    vanilla: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    prompts: dict[tuple[str, int], Prompt] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: RunDir) -> StoredOutputs:
        """Read the stored outputs from the folder of a run."""
        outputs = cls(prompts={(p.prompt_id, p.turn): p for p in run_dir.prompts()})
        for key, ids in run_dir.read_output_ids().items():
            outputs.add(key, ids)
        return outputs

    def add(self, key: RecordKey, output_ids: list[int] | None) -> None:
        """Add the output of a record."""
        self.done.add(key)
        prompt_id, turn, label, pass_ = key
        if label == BASELINE and output_ids is not None:
            self.vanilla[prompt_id, turn, pass_] = output_ids

    def lacks_output(
        self, question: Question, method_runs: Sequence[MethodRun], number: int
    ) -> bool:
        """Return True if an output of some methods on a question is missing in a repeat.

        Args:
            question: The question.
            method_runs: The methods.
            number: Number of the repeat.
        """
        return any(
            key not in self.done
            for method_run in method_runs
            for key in output_keys(question, method_run, number)
        )

    def select(self, names: Collection[str]) -> StoredOutputs:
        """Return the stored outputs of some questions.

        Args:
            names: Prompt ids of the questions.
        """
        return StoredOutputs(
            {key for key in self.done if key[0] in names},
            {key: ids for key, ids in self.vanilla.items() if key[0] in names},
            {key: prompt for key, prompt in self.prompts.items() if key[0] in names},
        )

    def update(self, other: StoredOutputs) -> None:
        """Add stored outputs that another process has sent."""
        self.done |= other.done
        self.vanilla |= other.vanilla
        self.prompts |= other.prompts


def output_keys(question: Question, method_run: MethodRun, number: int) -> list[RecordKey]:
    """Return the record keys of a method's outputs for a question in a repeat, one per turn."""
    turns = range(1, len(question.turns) + 1)
    return [(question.prompt_id, turn, method_run.label, number) for turn in turns]
