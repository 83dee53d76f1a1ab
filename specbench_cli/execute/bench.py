"""The test bench: tokenizer, decoders and states of a run, loaded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from specbench_cli.engine.checkpoint import ConfigFacts, config_facts
from specbench_cli.engine.load import load_decoder, module_of
from specbench_cli.engine.session import Workspace
from specbench_cli.engine.stop import StopRule
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.execute.plan import Plan
from specbench_cli.models.resolve import Checkpoint
from specbench_cli.tasks import answer_text, conversation, render


class Bench:
    """What decoding needs, for all cells of a run.

    Attributes:
        workspace: decoders and states.
        tokenizer: transformers' own, of the target.
        module: builds transformers' own module of a role.
        facts: by role, what is known of each checkpoint.
        device: where everything runs.
    """

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        self._plan = plan
        self.device = choose_device(config.device)
        if config.threads:
            torch.set_num_threads(config.threads)
        checkpoints = {"target": plan.target} | ({"draft": plan.draft} if plan.draft else {})
        self.facts: dict[str, ConfigFacts] = {
            role: config_facts(checkpoint.path) for role, checkpoint in checkpoints.items()
        }
        self.tokenizer = _tokenizer(plan.target)
        if plan.draft:
            _same_vocabulary(plan.target, self.tokenizer, plan.draft)
        dtype: torch.dtype = getattr(torch, config.dtype)
        decoders = {
            role: load_decoder(checkpoint.path, name=role, device=self.device, dtype=dtype)
            for role, checkpoint in checkpoints.items()
        }
        self.context = min(decoder.max_positions for decoder in decoders.values())
        # Building a module takes a second or more: peers and near-ties need it, others do not.
        self.module = cache(lambda role: module_of(decoders[role]))
        self.workspace = Workspace(decoders, 0, self.module, self.tokenizer)

    def prompt(self, turns: Sequence[str], answers: Sequence[Sequence[int]]) -> list[int]:
        """The ids of a prompt: the questions so far, with the answers given in between."""
        messages = conversation(turns, [answer_text(self.tokenizer, ids) for ids in answers])
        return render(self.tokenizer, messages, raw=self._plan.config.raw)

    def stop(self, budget: int) -> StopRule:
        """The one stop rule with a budget."""
        return StopRule(eos=self.facts["target"].eos, max_new_tokens=budget)

    def check_fits(self, name: str, prompt: int, budget: int) -> None:
        """Raise UsageError if a prompt and its budget are longer than the models' context."""
        if prompt + budget > self.context:
            raise UsageError(
                f"prompt {name} has {prompt} tokens; with {budget} new ones that is more than the"
                f" {self.context} positions that {self._plan.target.label} and its draft have",
                hint="lower --max-new-tokens, leave the prompt out, or choose a model with more",
            )

    def resolved(self) -> dict[str, Any]:
        """The values of the configuration that only the machine could tell."""
        return {"threads": torch.get_num_threads(), "device": str(self.device)}

    def models(self) -> dict[str, Mapping[str, Any]]:
        """What the manifest keeps of each model."""
        labels = {"target": self._plan.target.label}
        if self._plan.draft:
            labels["draft"] = self._plan.draft.label
        return {
            role: {
                "label": labels[role],
                **{name: value for name, value in asdict(facts).items() if name != "eos"},
                "eos": sorted(facts.eos),
                "weight_bytes": self.workspace.decoders[role].weight_bytes,
                "engine": type(self.workspace.decoders[role]).__name__,
            }
            for role, facts in self.facts.items()
        }


def choose_device(name: str) -> torch.device:
    """The device asked for; "auto" is the first GPU, else the CPU. Raises EnvironmentFault."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"there is no device {name}: torch {torch.__version__} sees"
            f" {torch.cuda.device_count()} CUDA devices",
            hint="--device cpu",
        )
    return device


def _tokenizer(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentFault(
            f"the tokenizer of {checkpoint.label} does not load: {error}",
            hint="put the model's tokenizer files beside its weights",
        ) from error


def _same_vocabulary(target: Checkpoint, tokenizer: Any, draft: Checkpoint) -> None:
    ours, theirs = tokenizer.get_vocab(), _tokenizer(draft).get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != index for token, index in ours.items())
        raise UsageError(
            f"{draft.label} cannot draft for {target.label}: their vocabularies differ"
            f" ({differing} of {len(ours)} tokens have another id or none)",
            hint="choose a --draft with the target's tokenizer",
        )
