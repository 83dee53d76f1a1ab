"""Draft heads, which read the target's own rows.

A `Head` is a decoder whose row i holds the token i + 1 of the text beside the target's features of
token i, and says what token i + 2 may be (EAGLE, Li et al., ICML 2024, arXiv:2401.15077). A
`FeatureHead` has no state: it says several next tokens from features alone (Medusa, Cai et al.,
ICML 2024, arXiv:2401.10774).
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

NORMED = -1
"""The tap that stands for the rows that the target's output matrix reads."""

MAX_LEVELS = 64
"""Of a head that says each level apart: no draft is longer."""


class Head(Decoder):
    """A decoder whose forward takes `Features` and whose logits are over the target's ids.

    Ids that it cannot say have logits of -inf. Its `Out.hidden` takes the place of the target's
    features for the next level of a draft.

    Attributes:
        taps: layers of the target whose outgoing rows it reads, side by side, or `NORMED`.
        levels: how many it can draft; None: as many as are wanted.
        together: drafted tokens that a forward reads side by side; it says as many behind them.
        parallel: whether it reads more ids than features: those beyond are masks, each of whose
            rows says the token at its own place, and nothing of them is kept (DFlash, Chen et al.,
            arXiv:2602.06036).
        own_place: whether a mask says that, or the token behind its place (P-EAGLE, Hui et al.,
            arXiv:2602.01469), where the last token that has features says the first one.
    """

    taps: tuple[int, ...]
    levels: int | None = None
    parallel: ClassVar[bool] = False
    own_place: ClassVar[bool] = True
    together: ClassVar[int] = 1
    first = 1


class FeatureCache:
    """The target's features of committed tokens, until a head has read them.

    Args:
        target: the model whose rows they are.
        taps: see `Head`.

    Attributes:
        layers: those whose outgoing rows are wanted.
        latest: the features of the last forward's rows, rejected ones too; None before the first.
    """

    def __init__(self, target: Decoder, taps: Sequence[int]) -> None:
        self._target, self._taps = target, tuple(taps)
        self.layers = tuple(tap for tap in self._taps if tap != NORMED)
        self.latest: Tensor | None = None
        self._unread_rows: list[Tensor] = []
        self._newest: Tensor | None = None  # what was kept last, read or not
        self._was_read = self._dropped_some = False

    def write(self, out: ModelOutput) -> None:
        """Take the features [n, width] of a forward's rows."""
        self.latest = features(out, self._taps, self._target)

    def keep(self, path: Sequence[int]) -> None:
        """Of the last forward's rows, keep those at `path`."""
        assert self.latest is not None
        n = len(path)
        if n == 0 or path[-1] == n - 1:
            rows = self.latest[:n]
        else:
            index = host.ids(path, self.latest.device)
            rows = self.latest.index_select(0, index)
        self._unread_rows.append(rows)
        self._newest = rows

    def read(self) -> Tensor:
        """All rows kept since the last time, [n, width].

        Raises:
            MethodFault: some were let go, since only `last` had been called.
        """
        if self._dropped_some:
            raise MethodFault(
                "the features that `session.pending_features` is to give were let go",
                "call `session.pending_features` before the first `session.features`",
            )
        self._was_read = True
        rows = self._unread_rows[0] if len(self._unread_rows) == 1 else torch.cat(self._unread_rows)
        self._unread_rows.clear()
        return rows

    def last(self, n: int) -> Tensor:
        """The newest n rows kept, [n, width], all of one forward."""
        if self._newest is None:
            raise MethodFault("there are no features before the prefill", "ask in `propose`")
        if not 1 <= n <= len(self._newest):
            raise MethodFault(
                f"the last step left features of {len(self._newest)} tokens, not of {n}",
                "ask in `observe` for as many as were committed",
            )
        if not self._was_read:  # nobody reads the others, which would be kept to the text's end
            self._unread_rows.clear()
            self._dropped_some = True
        return self._newest[-n:]


def features(out: ModelOutput, taps: Sequence[int], target: Decoder) -> Tensor:
    """What a head reads of a target's forward over one sequence, [n, width]."""
    parts = [
        target.norm(out.hidden[0]) if tap == NORMED else out.aux_hidden_states[tap][0]
        for tap in taps
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


# ---- heads without a state ----------------------------------------------------------------------


class FeatureHead(nn.Module, Artifact):
    """A draft head without a state: logits of several next tokens from one row of features.

    A subclass makes its parameters in `__init__` and computes in `forward`. Decoding and training
    use this same module; a method gets it behind the meter (`Session.artifact`) and calls it.

    Its folder holds config.json, with `sizes` and, under "specbench", its kind and the hash of its
    target; and model.safetensors, with its parameters by their names here. `save` writes both.

    Args:
        target: the decoder that it drafts for: `hidden_size`, `vocab_size`, `n_layers`; `unembed`
            gives logits of rows that its output matrix reads, `embed` gives rows of ids. In
            training they are torch's own, and no forward is there.
        sizes: the subclass's further arguments, to be kept in config.json.

    Attributes:
        taps: the target's layers whose outgoing rows it reads side by side, or `NORMED`.
        width: numbers of a row that it reads.
        ran: how often it was called; see `Decoder`.
        peak_lr, decay: for `specbench train head`: the largest learning rate, and the weight of a
            level's loss beside that of the level before it.
        trained: the sizes of heads that are trained here, where they are not `__init__`'s defaults.
    """

    taps: tuple[int, ...] = (NORMED,)
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
        """`forward`, counted."""
        self.__dict__["ran"] += 1  # past what a torch module does when an attribute is set
        return super().__call__(*rows, **named)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits [levels, n, V] from features [n, width].

        Level k is about the token k + 2 places behind the one whose features they are: the next
        token is the target's own, which roots the draft.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `forward`")

    @property
    def width(self) -> int:
        """See the class."""
        return len(self.taps) * self.target.hidden_size

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        """See `Artifact`."""
        return sum(each.nbytes for each in (*self.parameters(), *self.buffers()))

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """The head in a folder that `save` wrote; see `Artifact.load`."""
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
        head = cls.sized(target, config.get("sizes", {}), weights, folder)
        try:
            head.load_state_dict(dict(weights))
        except RuntimeError as fault:
            raise _head_fault(folder, str(fault).strip().splitlines()[-1].strip()) from None
        return head.ready()

    @classmethod
    def sized(
        cls, target: Decoder, sizes: Mapping[str, Any], weights: Weights, folder: Path
    ) -> Self:
        """One to be filled with a checkpoint's weights; none is made that holds much more.

        Raises:
            EnvironmentFault: the sizes are no head's, or another's.
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
        """One as `__init__` makes it; see `Artifact.random`."""
        return cls._create(decoders["target"], {}, seed).ready()

    def save(self, folder: Path, **facts: Any) -> None:
        """Write what `load` reads; `facts` go beside its kind and its target's hash."""
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
        """It where its target computes, in its dtype, to be used; for a `load` of one's own."""
        return self.to(self.target.device, self.target.dtype).requires_grad_(False).eval()

    @classmethod
    def _create(cls, target: Decoder, sizes: Mapping[str, Any], seed: int = 0) -> Self:
        """A new one; torch's own chance stays as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` seeds devices too
            return cls(target, **sizes)


class LevelOutput(NamedTuple):
    """What a `SequentialHead` answers of n nodes of a level: logits [n, V] of their children, and
    rows [n, w] that the calls of those read."""

    logits: Tensor
    rows: Tensor


class SequentialHead(FeatureHead):
    """A draft head without a state that reads the tokens drafted so far, a call a level (Hydra,
    Ankner et al., arXiv:2402.05109; Clover, Xiao et al., arXiv:2405.00263).

    At level 0 a call reads the target's features beside the last committed token, which roots the
    draft; at level k the rows that the call of level k - 1 left at the parents, beside the tokens
    of the nodes. It says what follows them.
    """

    def forward(self, rows: Tensor, ids: Tensor, level: int) -> LevelOutput:  # type: ignore[override]
        """Logits of the tokens behind n nodes.

        Args:
            rows: [n, width] features at level 0; later the parents' `LevelOutput.rows`.
            ids: [n] int64, the nodes' own tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `forward`")


class LookAhead(FeatureHead):
    """A draft head that is rows of the target's own forward, and says ahead through its layers
    (Parallel Decoding via Hidden Transfer, Wu et al., arXiv:2404.12022).

    Behind the root and each node of a draft `levels` rows enter the target at `layer`: row k stands
    k + 1 places behind its node, sees what that sees, the node and the rows before it, and says the
    token behind its own place. No row of the text sees them, and nothing is kept of them
    (`Session.reserve`).

    Args:
        levels: rows behind each node.
        layer: the target's first layer that they go through; default: the middle one.

    Attributes:
        tuned: whether the target learns beside it, by additions of this rank to its matrices (LoRA,
            Hu et al., arXiv:2106.09685); 0: it stays as it is.
        updates, sequences: of its training: on the corpus and on replies, of 512 tokens each. Its
            rows go through the target, which costs more than reading kept ones.
        taps: the layer whose outgoing rows `forward` reads; of layer 0, which reads embeddings, a
            matter of form.

    Raises:
        MethodFault: the target has no such layer.
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
        self.layer, self.taps = layer, (max(0, layer - 1),)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [n, levels, hidden] that enter layer `layer`.

        Args:
            rows: [n, hidden] of the n nodes that they stand behind, as these enter that layer.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `forward`")


@contextmanager
def _limit_parameters(weights: Weights) -> Iterator[None]:
    """Within, modules with more than twice as many parameters as there are weights raise ValueError
    as they are made, which would else take all memory, or hours. (Fewer are told by name.)"""
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
    # What loads models takes a second to import; whoever has a decoder has imported it already.
    from specbench_cli.engine.models.load import sha256_of

    return sha256_of(decoder)


def _head_fault(folder: Path, what: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{folder.name}: {what}",
        "give the folder of another, --set METHOD.head=DIR, or train one: specbench train head",
    )
