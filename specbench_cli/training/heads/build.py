"""Draft heads for an already trained target: training schedules, initial weights and files.

A head is stored in fp16, under the tensor names of the published heads. It is always evaluated with
the rounded weights. Its config.json names the target.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from methods._heads.files import HeadShape
from methods._heads.layouts import to_stored_names
from methods._heads.module import DraftHead, ParallelHead, get_head_classes
from methods._heads.recipe import HeadRecipe, TargetStatistics
from specbench_cli import files
from specbench_cli.engine.models.decoder import Decoder, ModelInput, State
from specbench_cli.engine.models.head import FeatureHead, LookAhead, SequentialHead
from specbench_cli.engine.types import ModelOutput
from specbench_cli.errors import MethodFault, UsageError
from specbench_cli.training.loop import Schedule, StagePlan

DEFAULT_STEPS = 2000
DEFAULT_LR = 1e-3
DRAFT_VOCAB_SIZE = 8192
"""Settings for targets outside the embedded family. An update has 2,048 tokens."""

LINEAR_TOKENS = 300_000
RIDGE = 1e-3
"""Ridge penalty of the least-squares start, relative to the mean square of its inputs."""


@dataclass(frozen=True, kw_only=True)
class HeadSchedule(Schedule):
    """Training schedule of a head with a KV cache, such as EAGLE.

    Attributes:
        kind: kind of head, such as "eagle3".
        mlp: width of the layer's MLP.
        draft_vocab_size: size of the draft vocabulary. None means the size in the head's recipe.
    """

    kind: str
    mlp: int
    draft_vocab_size: int | None = None

    @classmethod
    def for_embedded(cls, head: type[DraftHead]) -> "HeadSchedule":
        """Return the schedule of a head that specbench ships, with less than a million parameters.

        Sequences have 512 tokens, because all replies of the shipped target fit in them.
        """
        recipe = head.recipe
        return cls(
            name=f"embedded-{head.kind}",
            kind=head.kind,
            mlp=recipe.mlp,
            stages=(
                StagePlan(recipe.corpus_updates, recipe.sequences, 512, "target", "corpus"),
                StagePlan(recipe.reply_updates, recipe.sequences, 512, "target", "replies"),
            ),
            peak_lr=recipe.peak_lr,
            warmup_steps=min(100, (recipe.corpus_updates + recipe.reply_updates) // 10),
        )

    @classmethod
    def for_target(cls, head: type[DraftHead], label: str, mlp: int) -> "HeadSchedule":
        """Return the schedule for another target. The only training data are replies of the target.

        Args:
            label: name of the target, the prefix of the head's name.
            mlp: width of the MLPs of the target and of the head.
        """
        return cls(
            name=f"{label}-{head.kind}",
            kind=head.kind,
            mlp=mlp,
            stages=(StagePlan(DEFAULT_STEPS, 4, 512, "target", "replies"),),
            peak_lr=DEFAULT_LR,
            draft_vocab_size=DRAFT_VOCAB_SIZE,
        )


def make_stateless_schedule(
    kind: type[FeatureHead], *, is_embedded: bool = True, label: str | None = None
) -> Schedule:
    """Return the training schedule of a head without a KV cache, such as Medusa.

    Args:
        is_embedded: whether the target is a small model that specbench ships. Other targets have no
            training corpus.
        label: name of the target, the prefix of the head's name. None for a plug-in's head, whose
            name has no prefix.
    """
    stages: tuple[StagePlan, ...] = (
        StagePlan(500, 4, 512, "target", "corpus"),
        StagePlan(500, 4, 512, "target", "replies"),
    )
    if not is_embedded:
        stages = (StagePlan(DEFAULT_STEPS, 4, 512, "target", "replies"),)
    name = kind.kind if label is None else f"{label}-{kind.kind}"
    if issubclass(kind, LookAhead) and is_embedded:
        pairs = zip(kind.updates, stages, strict=True)
        stages = tuple(
            replace(each, steps=steps, sequences=kind.sequences) for steps, each in pairs
        )
        return Schedule(
            name=name, stages=stages, peak_lr=kind.peak_lr, warmup_steps=sum(kind.updates) // 15
        )
    if label is None:
        return Schedule(name=name, stages=stages, peak_lr=kind.peak_lr)
    peak_lr = HeadRecipe.peak_lr if is_embedded else DEFAULT_LR
    return Schedule(name=name, stages=stages, peak_lr=peak_lr)


def make_parallel_schedule(kind: type[ParallelHead], label: str, *, is_embedded: bool) -> Schedule:
    """Return the schedule of a head that drafts all tokens in one forward.

    The head is trained only on replies of the target. Few replies are enough, because the head
    drafts from many positions of each reply.

    Args:
        label: name of the target, the prefix of the head's name.
        is_embedded: whether the target is a small model that specbench ships.
    """
    recipe = kind.recipe
    stage = StagePlan(recipe.reply_updates, 4, 256, "target", "replies")
    if not is_embedded:
        stage = StagePlan(DEFAULT_STEPS, 4, 512, "target", "replies")
    return Schedule(name=f"{label}-{kind.kind}", stages=(stage,), peak_lr=recipe.peak_lr)


SCHEDULES = {kind: HeadSchedule.for_embedded(head) for kind, head in get_head_classes().items()}


def build_head(
    schedule: HeadSchedule,
    target: LlamaConfig,
    seed: int,
    answers: Iterable[int],
    row_scale: Callable[[tuple[int, ...]], Tensor],
) -> DraftHead:
    """Return a head with initial weights, in fp32.

    Args:
        answers: tokens of the target's answers. The draft vocabulary contains the most frequent
            ones.
        row_scale: function that takes layer numbers and returns the approximate magnitude of the
            target's hidden states after these layers.
    """
    torch.manual_seed(seed)
    config, vocab = make_head_config(target, schedule.mlp), target.vocab_size
    statistics = TargetStatistics(
        n_layers=target.num_hidden_layers,
        vocab_size=vocab,
        frequent_ids=lambda n: find_most_frequent(
            answers, schedule.draft_vocab_size or n or vocab, vocab
        ),
        row_scale=row_scale,
    )
    rope = {"rope_parameters": config.rope_parameters}
    head = get_head_classes()[schedule.kind].new(get_head_shape(config), rope, statistics)
    head.init_weights(target.initializer_range)
    return head


@torch.no_grad()
def init_from_least_squares(
    head: DraftHead, target: LlamaForCausalLM, texts: Iterable[tuple[Tensor, Tensor, Tensor]]
) -> None:
    """Initialise a head as the linear map that best predicts the target's next hidden state.

    The map is fitted to `LINEAR_TOKENS` tokens by ridge regression (Hoerl and Kennard,
    Technometrics 12, 1970, equation 2.1). A head without `linear_input` is not changed.

    Args:
        texts: ids [n], features [n, layers * width] and normed hidden states [n, width] of each
            text.
    """
    norm, sums, n_tokens = target.model.norm.weight, list[Tensor](), 0
    for ids, features, normed in texts:
        inputs = head.linear_input(target.model.embed_tokens(ids[1:-1]), features[:-2])
        if inputs is None:
            return
        pair = [(inputs.T @ inputs).double(), (inputs.T @ normed[1:-1]).double()]
        sums = [a + b for a, b in zip(sums, pair, strict=True)] if sums else pair
        n_tokens += len(inputs)
        if n_tokens >= LINEAR_TOKENS:
            break
    squares, products = sums
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares), device=squares.device)
    head.init_from_linear(torch.linalg.solve(squares + ridge, products).to(norm.dtype), norm)


class TorchTarget(Decoder):
    """Target for the training of a head without a KV cache, such as Medusa.

    The object provides the embedding, the final norm and the output matrix as torch modules, but no
    forward.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        config = model.config
        self.name, self._model = "target", model
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.n_layers, self.max_positions = config.num_hidden_layers, config.max_position_embeddings
        self.device, self.dtype, self.weight_bytes = model.device, model.dtype, 0

    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """Raise MethodFault, because training uses no KV cache."""
        raise MethodFault("during training, the target of a head has no states")

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Raise MethodFault, because training passes the target's features to the head."""
        raise MethodFault("during training, a head cannot run the target; it gets its features")

    def embed(self, ids: Tensor) -> Tensor:
        """Return the target's embeddings of token ids."""
        rows: Tensor = self._model.model.embed_tokens(ids)
        return rows

    def norm(self, rows: Tensor) -> Tensor:
        """Return `rows` after the target's final norm."""
        normed: Tensor = self._model.model.norm(rows)
        return normed

    def unembed(self, rows: Tensor) -> Tensor:
        """Return logits, computed with the target's output matrix."""
        logits: Tensor = self._model.lm_head(rows)
        return logits


def build_stateless_head(
    kind: type[FeatureHead], target: LlamaForCausalLM, seed: int
) -> tuple[FeatureHead, int]:
    """Return a new head without a KV cache (such as Medusa), and its number of draft steps.

    Raises:
        UsageError: the head does not return logits for each draft step.
    """
    torch.manual_seed(seed)
    head = kind(TorchTarget(target), **kind.trained).to(target.device)
    rows = torch.zeros(1, head.width, device=target.device)
    if isinstance(head, SequentialHead | LookAhead):
        return head, head.sizes["levels"]
    with torch.no_grad():
        logits = head(rows)
    if logits.dim() != 3 or logits.shape[1:] != (1, head.vocab_size):
        raise UsageError(
            f"{kind.__name__} returns the shape {list(logits.shape)} for features"
            f" [1, {head.width}]; a head that is trained here must return logits"
            f" [levels, 1, {head.vocab_size}]",
            "docs/how-to/heads.md",
        )
    return head, len(logits)


def find_most_frequent(tokens: Iterable[int], n: int, vocabulary: int) -> Tensor:
    """Return the `n` most frequent token ids, in ascending order.

    Among equally frequent ids, lower ids are preferred.

    Args:
        vocabulary: size of the vocabulary.
    """
    counts = Counter(tokens)
    ids = sorted(range(vocabulary), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ids[:n]))


def make_head_config(target: LlamaConfig, mlp: int) -> LlamaConfig:
    """Return transformers' config of a head's layer.

    It is the target's config, with one KV head per query head.

    Args:
        target: config of the target.
        mlp: width of the MLP.
    """
    head_dim = target.hidden_size // target.num_attention_heads
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters=target.rope_parameters,
        rms_norm_eps=target.rms_norm_eps,
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
    )


def get_head_shape(config: LlamaConfig) -> HeadShape:
    """Return the sizes of a head's layer."""
    return HeadShape(**{name: getattr(config, name) for name in HeadShape.__dataclass_fields__})


@torch.no_grad()
def round_to_fp16(head: torch.nn.Module) -> None:
    """Round the weights of a head to fp16, because files store weights in fp16."""
    for parameter in head.parameters():
        parameter.copy_(parameter.half())


def to_stored_tensors(head: DraftHead) -> dict[str, Tensor]:
    """Return the tensors of a head, by their names in published checkpoints.

    Weights are in fp16. Integer tensors such as vocabulary maps are unchanged.
    """
    named = to_stored_names(head.layouts[0], head.tensors())
    return {
        name: tensor.half().cpu().contiguous() if tensor.is_floating_point() else tensor
        for name, tensor in named.items()
    }


def export(head: DraftHead, config: LlamaConfig, folder: Path, facts: dict[str, Any]) -> None:
    """Write model.safetensors and config.json of a head.

    Args:
        config: the result of `make_head_config`.
        facts: entries that are stored under the key "specbench" of config.json.
    """
    vocabulary = {} if head.draft_ids is None else {"draft_vocab_size": len(head.draft_ids)}
    entries = config.to_diff_dict() | {
        **head.file_config(),
        **vocabulary,
        "dtype": "float16",
        "specbench": {**facts, "taps": list(head.captured_layers)},
    }
    write_head(folder, to_stored_tensors(head), entries)


def write_head(
    folder: Path,
    named: dict[str, Tensor],
    config: dict[str, Any],
    *,
    weights: str = "model.safetensors",
    config_name: str = "config.json",
) -> None:
    """Write the tensors and the configuration of a head to a folder.

    Earlier content is replaced.
    """
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    with files.staging_folder(folder, overwrite=None) as staging:
        save_file(named, staging / weights, metadata={"format": "pt"})
        (staging / config_name).write_text(text, encoding="utf-8")
