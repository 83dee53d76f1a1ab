"""The shipped pair of models (embedded) and its heads, for audits with trained distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from specbench_cli.audit.models.observed_session import ObservedSession, nominal_cost
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models.artifact import ArtifactSpec
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import UsageError
from specbench_cli.models.heads import resolve_head
from specbench_cli.models.resolve import Checkpoint, resolve

TEXTS = (
    "How many apples are left if I have 12 and give away 5?",
    "Write a short letter to a friend about the weather.",
    "Translate into German: the red house stands by the river.",
    "Why is the sky blue?",
    "Summarize: the meeting began at nine, ended at ten, and nothing was decided.",
    "A train leaves at 8:15 and arrives at 10:40. How long does it take?",
    "Name three animals that live in the sea.",
    "What should one take along on a walk in the mountains in autumn?",
)

SPARE = 96
"""Spare rows of the state, for the nodes of a tree."""


@dataclass(frozen=True, eq=False)
class EmbeddedPair:
    """The embedded target and draft, loaded for audits.

    Attributes:
        workspace: workspace with both models.
        prompts: token ids of `TEXTS`.
    """

    workspace: Workspace
    prompts: Sequence[tuple[int, ...]]

    def open(self, prompt: int, sampling: Sampling, budget: int, memory: Memory) -> ObservedSession:
        """Return a session on a prompt. Only the budget ends the output, not an EOS token."""
        stop = StopRule(frozenset(), budget)
        request = Request(f"embedded/{prompt}", 0, self.prompts[prompt], stop)
        self.workspace.reserve(len(request.ids) + budget + SPARE)
        return ObservedSession(self.workspace, request, sampling, memory=memory)

    def module(self, role: str) -> Any:
        """Return the transformers module of a role."""
        return get_module(self.workspace.decoders[role])


@cache
@torch.inference_mode(False)  # weights created in inference mode cannot be trained
def load_embedded_pair() -> EmbeddedPair:
    """Load the embedded target and draft. Later calls return the same object.

    Raises:
        EnvironmentFault: the installation does not include these models.
    """
    from tokenizers import Tokenizer

    target = resolve("embedded")
    folders = {"target": target.path, "draft": resolve(target.draft or "embedded-1m").path}
    decoders: dict[str, Decoder] = {
        role: load_decoder(folder, name=role, device=torch.device("cpu"))
        for role, folder in folders.items()
    }
    read = Tokenizer.from_file(str(target.path / "tokenizer.json"))
    prompts = [tuple(read.encode(text).ids) for text in TEXTS]

    def make(wanted: ArtifactSpec) -> Any:
        return _head(wanted, target, decoders)

    return EmbeddedPair(Workspace(decoders, 256, load_artifact=make, costs=nominal_cost), prompts)


def _head(wanted: ArtifactSpec, target: Checkpoint, decoders: dict[str, Decoder]) -> Any:
    """Return the shipped head of the target, or one with random weights if none is shipped."""
    kind = wanted.kind
    try:
        files = resolve_head(wanted.source, kind.kind, target, in_target=False)
    except UsageError:
        return kind.random(decoders)
    return kind.load(files.path, decoders)
