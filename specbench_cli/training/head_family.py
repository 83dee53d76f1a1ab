"""The embedded target's draft heads: shapes, schedules, and how a head is built and stored.

Files have the tensor names of the published releases, in fp16, and **the upcast is the head**;
`config.json` says which target's features it was trained on.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from specbench_cli.training.family import Schedule, StagePlan
from specbench_cli.training.heads import DraftHead, Eagle, Eagle3, Mtp

Kind = Literal["eagle", "eagle3", "mtp"]

DEEP = 16
"""From so many layers on, EAGLE-3's taps are the official ones."""


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(Schedule):
    """Shape and schedule of a head; its width and its attention are the target's.

    mlp: width of the layer's MLP.
    says: how many tokens it can say, the most frequent in the target's answers; None: all.
    """

    kind: Kind
    mlp: int
    says: int | None = None


def _stages(corpus: int, replies: int) -> tuple[StagePlan, ...]:
    """So many updates on the corpus, which has no end, so that little is learnt by heart; then on
    the target's own words, whose like the head will have to foresee. All replies fit in 512."""
    return (
        StagePlan(corpus, 4, 512, "target", "corpus"),
        StagePlan(replies, 4, 512, "target", "replies"),
    )


# Below a million parameters each.
EAGLE = HeadRecipe(
    name="embedded-eagle", kind="eagle", mlp=704, stages=_stages(700, 700), peak_lr=5e-3
)
EAGLE3 = replace(
    EAGLE, name="embedded-eagle3", kind="eagle3", mlp=384, says=2048, stages=_stages(1000, 1000)
)
MTP = replace(EAGLE, name="embedded-mtp", kind="mtp", stages=_stages(500, 500))
RECIPES: dict[Kind, HeadRecipe] = {recipe.kind: recipe for recipe in (EAGLE, EAGLE3, MTP)}


def build(
    recipe: HeadRecipe,
    target: LlamaConfig,
    seed: int,
    answers: Iterable[int],
    size: Callable[[tuple[int, ...]], Tensor],
) -> DraftHead:
    """A freshly initialised head, in fp32.

    Args:
        answers: tokens that the target answered with; those that a head can say are counted there.
        size: how large the target's rows are at such taps (see `Eagle3`).
    """
    torch.manual_seed(seed)
    config = head_config(target, recipe)
    head: DraftHead
    if recipe.kind == "eagle":
        head = Eagle(config)
    elif recipe.kind == "mtp":
        head = Mtp(config)
    else:
        says = most_frequent(answers, recipe.says or target.vocab_size, target.vocab_size)
        read = taps(target.num_hidden_layers)
        head = Eagle3(config, read, says, size(read))
    narrow = isinstance(head, Eagle3)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5 if narrow else target.initializer_range
            nn.init.normal_(module.weight, std=std)
    if narrow:  # its newest token enters through attention alone: a slot sees itself to begin with
        attention = head.layer.self_attn
        attention.q_proj.load_state_dict(attention.k_proj.state_dict())
    return head


def taps(n_layers: int) -> tuple[int, ...]:
    """The layers whose outgoing rows EAGLE-3 reads: low, middle, high.

    The official code takes what enters layers 2, N/2 and N-3, counted from 0. Of few layers the
    last of these is no high one (of 8 it is the middle), so there the last layer is read.
    """
    if n_layers >= DEEP:
        return (1, n_layers // 2 - 1, n_layers - 4)
    return (min(1, n_layers - 1), n_layers // 2, n_layers - 1)


def most_frequent(tokens: Iterable[int], n: int, vocabulary: int) -> Tensor:
    """The `n` most frequent ids of a vocabulary, rising; of equally frequent ones the lowest."""
    counts = Counter(tokens)
    ids = sorted(range(vocabulary), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ids[:n]))


def head_config(target: LlamaConfig, recipe: HeadRecipe) -> LlamaConfig:
    """A head's one layer in transformers' terms: the target's, with a key for each query head."""
    wide = target.hidden_size // target.num_attention_heads
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_attention_heads,
        head_dim=wide,
        intermediate_size=recipe.mlp,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters=target.rope_parameters,
        rms_norm_eps=target.rms_norm_eps,
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
    )


@torch.no_grad()
def as_stored(head: DraftHead) -> None:
    """Round a head to what its file will hold."""
    for parameter in head.parameters():
        parameter.copy_(parameter.half())


def tensors(head: DraftHead) -> dict[str, Tensor]:
    """A head's tensors by their names in the published releases, in fp16; maps as they are."""
    named = {
        head.prefix + name.replace("block.", ""): parameter.detach().half().cpu().contiguous()
        for name, parameter in head.named_parameters()
    }
    if isinstance(head, Eagle3):
        named["fc.weight"] = (head.fc.weight / head.size).detach().half().cpu()
        says = head.says.cpu()
        t2d = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        t2d[says] = True
        named |= {"d2t": says - torch.arange(len(says)), "t2d": t2d}
    return named


def export(head: DraftHead, folder: Path, facts: dict[str, Any]) -> None:
    """Write model.safetensors and config.json; `facts` go under "specbench"."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(head), folder / "model.safetensors", metadata={"format": "pt"})
    config = head.config.to_diff_dict() | {
        "architectures": [head.architecture],
        "dtype": "float16",
        "specbench": {**facts, "taps": list(head.taps)},
    }
    if head.kind == "eagle":
        config["bias"] = True
    if head.kind == "mtp":
        config["num_nextn_predict_layers"] = 1
    if head.says is not None:
        config["draft_vocab_size"] = len(head.says)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
