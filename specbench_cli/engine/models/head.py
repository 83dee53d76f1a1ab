"""Draft heads, which read hidden states of the target.

A `Head` is a decoder. Its row i combines token i + 1 of the text with the target's features of
token i, and predicts token i + 2 (EAGLE, Li et al., ICML 2024, arXiv:2401.15077). A `FeatureHead`
has no state. It predicts several next tokens from features only (Medusa, Cai et al., ICML 2024,
arXiv:2401.10774).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from specbench_cli.engine import host
from specbench_cli.engine.models.artifact import Artifact
from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.types import ModelOutput
from specbench_cli.errors import EnvironmentFault, MethodFault
from specbench_cli.former_names import renamed_members

NORMED = -1
"""Pseudo layer number: the hidden states after the final norm, which the output matrix reads."""

MAX_LEVELS = 64
"""Maximum number of levels of a head."""


@renamed_members(taps="captured_layers", together="block_size", own_place="predicts_own_position")
class Head(Decoder):
    """A draft head with a state, whose forward takes `Features` and returns logits over target ids.

    Ids outside the head's vocabulary have logits of -inf. `ModelOutput.hidden` replaces the
    target's features at the next draft level.

    Attributes:
        captured_layers: Layers of the target whose hidden states are concatenated, or `NORMED`.
        levels: Maximum number of draft levels. None is unlimited.
        block_size: Number of draft tokens that a forward reads together. It predicts the same
            number of tokens after them.
        parallel: Whether the head accepts more ids than features. The ids without features are
            mask tokens. Each mask row predicts the token at its own position, and no mask row is
            kept (DFlash, Chen et al., arXiv:2602.06036).
        predicts_own_position: Whether a mask row predicts the token at its own position. If False,
            it predicts the token after it, and the last token with features predicts the first
            draft token (P-EAGLE, Hui et al., arXiv:2602.01469).
    """

    captured_layers: tuple[int, ...]
    levels: int | None = None
    parallel: ClassVar[bool] = False
    predicts_own_position: ClassVar[bool] = True
    block_size: ClassVar[int] = 1
    first = 1


class FeatureCache:
    """Buffer of target features of committed tokens that the head has not read.

    Args:
        target: The target model.
        captured_layers: See `Head`.

    Attributes:
        layers: Captured layers of the target.
        latest: Features of all rows of the last forward, with those of rejected tokens. None
            before the first forward.
    """

    def __init__(self, target: Decoder, captured_layers: Sequence[int]) -> None:
        self._target, self._captured_layers = target, tuple(captured_layers)
        self.layers = tuple(at for at in self._captured_layers if at != NORMED)
        self.latest: Tensor | None = None
        self._pending_rows: list[Tensor] = []
        self._newest: Tensor | None = None  # the rows kept last, read or not
        self._was_read = self._dropped_some = False

    def write(self, out: ModelOutput) -> None:
        """Store the features [n, width] of a forward's rows."""
        self.latest = features(out, self._captured_layers, self._target)

    def keep(self, path: Sequence[int]) -> None:
        """Keep the features at `path`, of the rows of the last forward."""
        assert self.latest is not None
        n = len(path)
        if n == 0 or path[-1] == n - 1:
            rows = self.latest[:n]
        else:
            index = host.ids(path, self.latest.device)
            rows = self.latest.index_select(0, index)
        self._pending_rows.append(rows)
        self._newest = rows

    def read(self) -> Tensor:
        """Return all rows kept since the last call, [n, width].

        Raises:
            MethodFault: Rows were dropped, because `last` was called before the first `read`.
        """
        if self._dropped_some:
            raise MethodFault(
                "the features that `session.pending_features` is to give were let go",
                "call `session.pending_features` before the first `session.features`",
            )
        self._was_read = True
        rows = (
            self._pending_rows[0] if len(self._pending_rows) == 1 else torch.cat(self._pending_rows)
        )
        self._pending_rows.clear()
        return rows

    def last(self, n: int) -> Tensor:
        """Return the newest n rows kept, [n, width]. All of them come from one forward."""
        if self._newest is None:
            raise MethodFault("there are no features before the prefill", "ask in `propose`")
        if not 1 <= n <= len(self._newest):
            raise MethodFault(
                f"the last step left features of {len(self._newest)} tokens, not of {n}",
                "ask in `observe` for as many as were committed",
            )
        if not self._was_read:  # without `read`, older rows would accumulate to the end of the text
            self._pending_rows.clear()
            self._dropped_some = True
        return self._newest[-n:]


def features(out: ModelOutput, captured_layers: Sequence[int], target: Decoder) -> Tensor:
    """Return the features [n, width] of a target forward over one sequence."""
    parts = [
        target.norm(out.hidden[0]) if at == NORMED else out.aux_hidden_states[at][0]
        for at in captured_layers
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


# ---- heads without a state ----------------------------------------------------------------------


@renamed_members(taps="captured_layers", sized="from_sizes")
class FeatureHead(nn.Module, Artifact):
    """A draft head without a state, which predicts several next tokens from one row of features.

    A subclass creates its parameters in `__init__` and computes logits in `forward`. Decoding and
    training use the same module. A method gets it with timing from `Session.artifact` and calls it.

    `save` writes a folder with config.json and model.safetensors. config.json has `sizes` and,
    under "specbench", the head's kind and the hash of its target. model.safetensors has the
    parameters by name.

    Args:
        target: The target decoder, with `hidden_size`, `vocab_size` and `n_layers`. `unembed`
            returns logits of normed rows, and `embed` returns the rows of ids. In training these
            are torch modules, and the target has no forward.
        sizes: Further arguments of the subclass, stored in config.json.

    Attributes:
        captured_layers: Layers of the target whose hidden states are concatenated, or `NORMED`.
        width: Width of a feature row.
        ran: Number of calls; see `Decoder`.
        peak_lr: Maximum learning rate of `specbench train head`.
        decay: Loss weight of a level relative to the level before it, in `specbench train head`.
        trained: Sizes of heads that specbench trains, if they differ from the defaults of
            `__init__`.
    """

    captured_layers: tuple[int, ...] = (NORMED,)
    peak_lr: ClassVar[float] = 1e-3
    decay: ClassVar[float] = 0.8
    trained: ClassVar[Mapping[str, Any]] = {}
    n_layers = 1
    ran: int

    def __init__(self, target: Decoder, **sizes: Any) -> None:
        super().__init__()
        self.target, self.sizes, self.name = target, sizes, self.kind
        self.vocab_size, self.ran = target.vocab_size, 0

    def __call__(self, *rows: Any, **named: Any) -> Any:
        """Call `forward` and count the call."""
        self.__dict__["ran"] += 1  # avoids the slow attribute setter of torch modules
        return super().__call__(*rows, **named)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits [levels, n, V] from features [n, width].

        Level k predicts the token k + 2 positions after the token of the features. The target
        itself chooses the next token, which is the root of the draft.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `forward`")

    @property
    def width(self) -> int:
        """Width of a feature row."""
        return len(self.captured_layers) * self.target.hidden_size

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        """See `Artifact`."""
        return sum(each.nbytes for each in (*self.parameters(), *self.buffers()))

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load a head from a folder that `save` wrote; see `Artifact.load`."""
        target, file = decoders["target"], folder / "config.json"
        if not file.is_file():
            raise _head_fault(folder, "no config.json")
        config = json.loads(file.read_text(encoding="utf-8"))
        facts = config.get("specbench", {})
        if facts.get("kind") != cls.kind:
            raise _head_fault(
                folder, f"a head of kind {facts.get('kind')}; {cls.kind} was asked for"
            )
        trained_for, loaded = facts.get("target_sha256"), _sha256_of(target)
        if loaded is not None and trained_for not in (None, loaded):
            raise _head_fault(
                folder,
                f"trained for a target whose weights have the SHA-256 {trained_for[:12]}...; this"
                f" run's have {loaded[:12]}...",
            )
        weights = Weights(folder)
        head = cls.from_sizes(target, config.get("sizes", {}), weights, folder)
        try:
            head.load_state_dict(dict(weights))
        except RuntimeError as fault:
            raise _head_fault(folder, str(fault).strip().splitlines()[-1].strip()) from None
        return head.ready()

    @classmethod
    def from_sizes(
        cls, target: Decoder, sizes: Mapping[str, Any], weights: Weights, folder: Path
    ) -> Self:
        """Return an uninitialized head for the weights of a checkpoint.

        Raises:
            EnvironmentFault: The sizes are invalid, or need far more parameters than the
                checkpoint has.
        """
        try:
            levels = sizes.get("levels", 1)
            if type(levels) is not int or not 1 <= levels <= MAX_LEVELS:
                raise _head_fault(folder, f"levels is {levels!r}; a head has 1 to {MAX_LEVELS}")
            with _limit_parameters(weights):
                return cls._create(target, sizes)
        except (TypeError, ValueError, AttributeError, RuntimeError) as fault:
            raise _head_fault(folder, str(fault).strip().splitlines()[-1].strip()) from None

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a head with the initial weights of `__init__`; see `Artifact.random`."""
        return cls._create(decoders["target"], {}, seed).ready()

    def save(self, folder: Path, **facts: Any) -> None:
        """Write the files that `load` reads. `facts` are added to config.json under "specbench"."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.contiguous().cpu() for name, each in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        own = {"kind": self.kind, "target_sha256": _sha256_of(self.target)}
        config = {
            "architectures": [type(self).__name__],
            "sizes": self.sizes,
            "specbench": {**own, **facts},
        }
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    def ready(self) -> Self:
        """Return the head frozen, in eval mode, on the device and in the dtype of the target.

        A subclass with its own `load` calls this at the end.
        """
        return self.to(self.target.device, self.target.dtype).requires_grad_(False).eval()

    @classmethod
    def _create(cls, target: Decoder, sizes: Mapping[str, Any], seed: int = 0) -> Self:
        """Return a new head, and leave the state of torch's random generator unchanged."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` seeds devices too
            return cls(target, **sizes)


class LevelOutput(NamedTuple):
    """Output of a `SequentialHead` for n nodes of a level.

    Attributes:
        logits: Logits of the nodes' children, [n, V].
        rows: Rows that the call for the children reads, [n, w].
    """

    logits: Tensor
    rows: Tensor


class SequentialHead(FeatureHead):
    """A draft head without a state that reads the draft tokens, with one call per level.

    Examples are Hydra (Ankner et al., arXiv:2402.05109) and Clover (Xiao et al., arXiv:2405.00263).
    At level 0, a call reads the target's features and the last committed token, which is the root
    of the draft. At level k, it reads the nodes' tokens and the rows of their parents from level
    k - 1. It predicts the next token after each node.
    """

    def forward(self, rows: Tensor, ids: Tensor, level: int) -> LevelOutput:  # type: ignore[override]
        """Return logits of the next token after each of n nodes.

        Args:
            rows: Features [n, width] at level 0, later `LevelOutput.rows` of the parents.
            ids: Tokens of the nodes, [n] int64.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `forward`")


class LookAhead(FeatureHead):
    """A draft head whose extra rows pass through upper layers of the target.

    The method is Parallel Decoding via Hidden Transfer (Wu et al., arXiv:2404.12022). After the
    root and each node of a draft, `levels` extra rows enter the target at `layer`. Row k has the
    position k + 1 after its node. It attends to the node, to all that the node attends to, and to
    the extra rows before it, and predicts the token after its own position. Rows of the text do not
    attend to extra rows, and extra rows are not kept (`Session.reserve`).

    Args:
        levels: Number of extra rows after each node.
        layer: First layer of the target that the extra rows pass through. None is the middle layer.

    Attributes:
        tuned: LoRA rank of the target's own training (Hu et al., arXiv:2106.09685). 0 leaves the
            target unchanged.
        updates: Training steps on the corpus and on replies.
        sequences: Sequences of 512 tokens per step. The number is small, because the rows pass
            through the target.
        captured_layers: The layer whose output `forward` reads. It is unused if `layer` is 0, which
            reads embeddings.

    Raises:
        MethodFault: The target has no such layer.
    """

    tuned: ClassVar[int] = 0
    updates: ClassVar[tuple[int, int]] = (60, 240)
    sequences: ClassVar[int] = 2
    peak_lr: ClassVar[float] = 3e-3

    def __init__(self, target: Decoder, levels: int, layer: int | None = None, **sizes: Any):
        layer = target.n_layers // 2 if layer is None else layer
        if not 0 <= layer < target.n_layers:
            raise MethodFault(
                f"no row enters {target.name} at layer {layer}: it has {target.n_layers}",
                f"choose one of 0 to {target.n_layers - 1}",
            )
        super().__init__(target, levels=levels, layer=layer, **sizes)
        self.layer, self.captured_layers = layer, (max(0, layer - 1),)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the extra rows [n, levels, hidden] that enter layer `layer`.

        Args:
            rows: Rows [n, hidden] of the n nodes at the input of that layer.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `forward`")


@contextmanager
def _limit_parameters(weights: Weights) -> Iterator[None]:
    """Raise ValueError when a new module gets more than twice the parameters of the weights.

    Without the limit, wrong sizes could take all memory or hours. Smaller differences are reported
    by tensor name when the weights are loaded.
    """
    most, made = 2 * weights.parameters, 0
    names = set[tuple[int, str]]()

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal made
        if (place := (id(module), name)) not in names:
            names.add(place)
            made += parameter.numel()
        if made > most or len(names) > 2 * len(weights):
            held = f"{weights.parameters} numbers in {len(weights)} tensors"
            raise ValueError(f"its sizes need more than twice what its weights hold: {held}")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _sha256_of(decoder: Decoder) -> str | None:
    # Lazy: the import takes a second. A caller that has a decoder has already imported it.
    from specbench_cli.engine.models.load import sha256_of

    return sha256_of(decoder)


def _head_fault(folder: Path, what: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{folder.name}: {what}",
        "give the folder of another, --set METHOD.head=DIR, or train one: specbench train head",
    )
