"""Draft heads for a finished target: schedules, and how a head is built and stored.

Files have the tensor names of the published releases, in fp16, and **the upcast is the head**;
`config.json` says which target's features it was trained on.
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
"""For a target that is not of the embedded family: updates of 2,048 tokens."""

LINEAR_TOKENS = 300_000
RIDGE = 1e-3
"""Of the mean square of what is read: the linear beginning is found with it."""


@dataclass(frozen=True, kw_only=True)
class HeadSchedule(Schedule):
    """How long a kind of head learns.

    mlp: width of its layer's MLP. says: how many tokens it can say; None: what its recipe says.
    """

    kind: str
    mlp: int
    draft_vocab_size: int | None = None

    @classmethod
    def for_embedded(cls, head: type[DraftHead]) -> "HeadSchedule":
        """That of the shipped one, which has less than a million parameters. All replies fit in
        512 tokens."""
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
        """That for another target than the embedded one, on its replies alone.

        Args:
            label: the target's name, which the head's begins with.
            mlp: width of the target's MLPs, and of the head's.
        """
        name, stages = (
            f"{label}-{head.kind}",
            (StagePlan(DEFAULT_STEPS, 4, 512, "target", "replies"),),
        )
        return cls(
            name=name,
            kind=head.kind,
            mlp=mlp,
            stages=stages,
            peak_lr=DEFAULT_LR,
            draft_vocab_size=DRAFT_VOCAB_SIZE,
        )


def make_stateless_schedule(
    kind: type[FeatureHead], *, is_embedded: bool = True, label: str | None = None
) -> Schedule:
    """That of a head without a state; other targets than the embedded ones have no corpus.

    Args:
        label: of our own kinds: the target's name, which the head's begins with.
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
    """That of a drafter that says a whole draft at once, on replies alone. Each reply is drafted
    from at many places, so that a few of them will do.

    Args:
        label: the target's name, which the drafter's begins with.
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
    """A freshly initialised head, in fp32.

    Args:
        answers: tokens that the target answered with; those that a head can say are counted there.
        size: how large the target's rows are at such captured layers.
    """
    torch.manual_seed(seed)
    config, ids = make_head_config(target, schedule.mlp), target.vocab_size
    taught = TargetStatistics(
        n_layers=target.num_hidden_layers,
        vocab_size=ids,
        frequent_ids=lambda n: find_most_frequent(
            answers, schedule.draft_vocab_size or n or ids, ids
        ),
        row_scale=row_scale,
    )
    rope = {"rope_parameters": config.rope_parameters}
    head = get_head_classes()[schedule.kind].new(get_head_shape(config), rope, taught)
    head.init_weights(target.initializer_range)
    return head


@torch.no_grad()
def init_from_least_squares(
    head: DraftHead, target: LlamaForCausalLM, texts: Iterable[tuple[Tensor, Tensor, Tensor]]
) -> None:
    """Have a new head begin as the linear map by least squares that foresees the target's next row
    best from what it reads: its sums take one pass over rows that are there.

    Ridge regression (Hoerl and Kennard, Technometrics 12, 1970, equation 2.1), on `LINEAR_TOKENS`.

    Args:
        texts: ids [n], features [n, captured layers * width] and normed rows [n, width] of each;
            the last ones of a text are not read.
    """
    norm, sums, seen = target.model.norm.weight, list[Tensor](), 0
    for ids, features, normed in texts:
        read = head.linear_input(target.model.embed_tokens(ids[1:-1]), features[:-2])
        if read is None:
            return
        pair = [(read.T @ read).double(), (read.T @ normed[1:-1]).double()]
        sums = [a + b for a, b in zip(sums, pair, strict=True)] if sums else pair
        seen += len(read)
        if seen >= LINEAR_TOKENS:
            break
    squares, products = sums
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares), device=squares.device)
    head.init_from_linear(torch.linalg.solve(squares + ridge, products).to(norm.dtype), norm)


class TorchTarget(Decoder):
    """A finished target as heads without a state learn with it: torch's own modules, no forward."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        config = model.config
        self.name, self._model = "target", model
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.n_layers, self.max_positions = config.num_hidden_layers, config.max_position_embeddings
        self.device, self.dtype, self.weight_bytes = model.device, model.dtype, 0

    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """There is none."""
        raise MethodFault("in training a head's target has no states")

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """There is none."""
        raise MethodFault("in training a head's target has no forward: it gives features alone")

    def embed(self, ids: Tensor) -> Tensor:
        """See `Decoder`."""
        rows: Tensor = self._model.model.embed_tokens(ids)
        return rows

    def norm(self, rows: Tensor) -> Tensor:
        """See `Decoder`."""
        normed: Tensor = self._model.model.norm(rows)
        return normed

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`."""
        logits: Tensor = self._model.lm_head(rows)
        return logits


def build_stateless_head(
    kind: type[FeatureHead], target: LlamaForCausalLM, seed: int
) -> tuple[FeatureHead, int]:
    """A freshly initialised head without a state, and how many levels it says.

    Raises:
        UsageError: what it says is not logits of levels.
    """
    torch.manual_seed(seed)
    head = kind(TorchTarget(target), **kind.trained).to(target.device)
    rows = torch.zeros(1, head.width, device=target.device)
    if isinstance(head, SequentialHead | LookAhead):
        return head, head.sizes["levels"]
    with torch.no_grad():
        said = head(rows)
    if said.dim() != 3 or said.shape[1:] != (1, head.vocab_size):
        raise UsageError(
            f"from features [1, {head.width}] {kind.__name__} makes {list(said.shape)}; what is"
            f" trained here makes logits [levels, 1, {head.vocab_size}]",
            "docs/how-to/heads.md",
        )
    return head, len(said)


def find_most_frequent(tokens: Iterable[int], n: int, vocabulary: int) -> Tensor:
    """The `n` most frequent ids of a vocabulary, rising; of equally frequent ones the lowest."""
    counts = Counter(tokens)
    ids = sorted(range(vocabulary), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ids[:n]))


def make_head_config(target: LlamaConfig, mlp: int) -> LlamaConfig:
    """A head's one layer in transformers' terms: the target's, with a key for each query head."""
    wide = target.hidden_size // target.num_attention_heads
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_attention_heads,
        head_dim=wide,
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
    """The sizes of a head's layer."""
    return HeadShape(**{name: getattr(config, name) for name in HeadShape.__dataclass_fields__})


@torch.no_grad()
def round_to_fp16(head: torch.nn.Module) -> None:
    """Round a head to what its file will hold."""
    for parameter in head.parameters():
        parameter.copy_(parameter.half())


def to_stored_tensors(head: DraftHead) -> dict[str, Tensor]:
    """A head's tensors by their names in the published releases, in fp16; maps as they are."""
    named = to_stored_names(head.layouts[0], head.tensors())
    return {
        name: tensor.half().cpu().contiguous() if tensor.is_floating_point() else tensor
        for name, tensor in named.items()
    }


def export(head: DraftHead, config: LlamaConfig, folder: Path, facts: dict[str, Any]) -> None:
    """Write model.safetensors and config.json; `facts` go under "specbench".

    Args:
        config: what `head_config` gave.
    """
    told = {} if head.draft_ids is None else {"draft_vocab_size": len(head.draft_ids)}
    words = config.to_diff_dict() | {
        **head.file_config(),
        **told,
        "dtype": "float16",
        "specbench": {**facts, "taps": list(head.captured_layers)},
    }
    write_head(folder, to_stored_tensors(head), words)


def write_head(
    folder: Path,
    named: dict[str, Tensor],
    config: dict[str, Any],
    *,
    weights: str = "model.safetensors",
    config_name: str = "config.json",
) -> None:
    """Write the tensors and the configuration of a head to a folder, which they replace."""
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    with files.staging_folder(folder, overwrite=None) as staging:
        save_file(named, staging / weights, metadata={"format": "pt"})
        (staging / config_name).write_text(text, encoding="utf-8")
