"""Training data and files of SpecEE's exit predictors. `methods.specee.training` trains them.

The target answers training questions greedily. `collect_logits` then computes the logits after
each layer for each token of the answers.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from methods.specee.predictors import TOP, ExitPredictors
from methods.specee.training import EarlyLogits, PredictorQuality
from specbench_cli import files
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.workspace import Workspace
from specbench_cli.training.heads.judge import MAX_ANSWER, complete_answer

N_QUESTIONS = 1500
"""Default number of training questions."""


@torch.inference_mode()
def collect_logits(
    target: Decoder,
    draft: Decoder,
    prompts: Sequence[Sequence[int]],
    ends: frozenset[int],
    report: Callable[[int], None] = lambda _: None,
) -> EarlyLogits:
    """Return the logits of the draft model's candidate tokens after each layer of the target.

    The logits are computed for each token of the target's greedy answers.

    Args:
        prompts: token ids of each prompt.
        ends: tokens that end an answer.
        report: function that is called with the number of prompts done.
    """
    workspace = Workspace({"target": target, "draft": draft}, max(map(len, prompts)) + MAX_ANSWER)
    layers, found = range(target.n_layers - 1), list[tuple[Tensor, ...]]()
    for at, prompt in enumerate(prompts):
        text = [*prompt, *complete_answer(workspace, prompt, (), ends)]
        x = Tokens(torch.tensor([text[:-1]], device=target.device))
        n = x.ids.shape[1]
        out = target.forward(x, target.new_state(n), logits_at="all", captured_layers=layers)
        guess = draft.forward(x, draft.new_state(n), logits_at="all").rows[len(prompt) :]
        ids = guess.topk(min(TOP, guess.shape[-1])).indices  # the first token is prefill's
        labels = out.rows[len(prompt) :].argmax(-1)
        early = torch.stack(
            [
                target.unembed(target.norm(out.aux_hidden_states[each][0, len(prompt) :]))
                for each in layers
            ],
            1,
        )
        predicted = early.argmax(-1)
        found.append(
            (
                early.gather(2, ids[:, None].expand(-1, len(layers), -1)).float().cpu(),
                (predicted == labels[:, None]).cpu(),
                (predicted[..., None] == ids[:, None]).any(-1).cpu(),
                torch.full((len(labels),), at),
            )
        )
        report(at + 1)
    return EarlyLogits(*map(torch.cat, zip(*found, strict=True)))


def export(
    folder: Path,
    predictors: ExitPredictors,
    tensors: dict[str, Tensor],
    quality: PredictorQuality,
    facts: dict[str, Any],
) -> None:
    """Write model.safetensors and config.json of SpecEE's exit predictors.

    Args:
        tensors: the predictors' tensors, by name.
        quality: quality on held-out questions. It is stored under "specbench" in config.json.
        facts: further entries under "specbench".
    """
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    origin = {"kind": "exits", **facts, "held_out": asdict(quality)}
    config = {
        "n_layers": len(tensors["down"]) + 1,
        "layers": list(predictors.layers),
        "specbench": origin,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    with files.staging_folder(folder, overwrite=None) as staging:
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        (staging / "config.json").write_text(text, encoding="utf-8")
