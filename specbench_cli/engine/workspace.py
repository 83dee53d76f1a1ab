"""What outlives a session: decoders, trained modules, and states that are made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models.artifact import Trained
from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.state import KVState
from specbench_cli.engine.types import Role
from specbench_cli.engine.workers.transport import Inline, Transport
from specbench_cli.errors import MethodFault


@dataclass
class Workspace:
    """What outlives a session: the decoders and their preallocated states.

    decoders: "target", and by role whatever else the run has ("draft").
    capacity: rows every state has room for; the longest prompt plus its budget.
    modules: builds transformers' own module of a role, for peers; tokenizer: transformers' own.
    make: makes a trained module that a method asks for.
    costs: time of a forward of a model, by name, over so many rows; in the time of a target forward
        over one. With a third argument: of so many sequences, and of all that their step does for
        it; with a fourth, whether they have as many rows each.
    recipes: by role, what makes a decoder in another process; it can be sent there.
    transport: where drafters that work beside the target run.
    role: what the forwards of its target count as, prefill apart.
    synthetic: what of its models is made up, in words; None: nothing.
    words: what the target's ids stand for; None: what the tokenizer says, if there is one.
    output_vocab_size: Number of ids that an output may contain. A draft that decodes alone is
        limited to the ids of the run's target, which judges its output. None: all ids.
    """

    decoders: Mapping[str, Decoder]
    capacity: int
    modules: Callable[[str], Any] | None = None
    tokenizer: Any = None
    load_artifact: Callable[[Trained], Any] | None = None
    costs: Callable[..., float] | None = None
    decoder_factories: Mapping[str, Callable[[], Decoder]] = field(default_factory=dict)
    transport: Transport = field(default_factory=Inline)
    role: Role = "verify"
    synthetic: str | None = None
    token_vocabulary: Vocabulary | None = None
    output_vocab_size: int | None = None
    # A decoder that goes, as a row's trained copy does, takes its states with it.
    _states: WeakKeyDictionary[Decoder, dict[tuple[int, int, int], list[State]]] = field(
        default_factory=WeakKeyDictionary
    )
    _artifacts: dict[Trained, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target = self.decoders.get("target")
        for decoder in self.decoders.values():
            if target is not None and decoder is not target:
                decoder.input_vocab_size = target.vocab_size

    def artifact(self, wanted: Trained) -> Any:
        """A trained module, made at first use and kept."""
        if wanted not in self._artifacts:
            if self.load_artifact is None:
                raise MethodFault(f"this run holds no trained module of kind {wanted.kind.kind!r}")
            self._artifacts[wanted] = self.load_artifact(wanted)
        return self._artifacts[wanted]

    def decode_alone(self, model: str) -> Workspace:
        """The same where one of the models decodes by itself, in the target's place and with its
        states, and nothing verifies; of the target it is itself."""
        if model == "target":
            return self
        size = self.decoders["target"].vocab_size
        return replace(
            self, decoders={"target": self.decoders[model]}, role="draft", output_vocab_size=size
        )

    def vocabulary(self) -> Vocabulary:
        """What the target's ids stand for; where there is no tokenizer, themselves.

        Raises:
            MethodFault: its tokenizer spells in a way that is not known here.
        """
        if self.token_vocabulary is None and self.tokenizer is None:
            self.token_vocabulary = Vocabulary.from_size(self.decoders["target"].vocab_size)
        elif self.token_vocabulary is None:
            try:
                size = self.decoders["target"].vocab_size
                self.token_vocabulary = Vocabulary.from_tokenizer(self.tokenizer).with_size(size)
            except ValueError as unknown:
                raise MethodFault(
                    f"the method reads what tokens say, and of the target's tokenizer {unknown}",
                    "choose a --target with a byte-level or SentencePiece tokenizer",
                ) from None
        return self.token_vocabulary

    def loans(self, seats: int = 1, seat: int = 0) -> StateAllocator:
        """States for one request, which may be one of several that are decoded together."""
        return StateAllocator(self, seats, seat)

    def models(self, memory: Memory | None = None) -> list[Decoder | FeatureHead]:
        """All that can be run forward: the run's decoders, its heads, and a row's own copies."""
        copies = () if memory is None else memory.copies
        made = (*self._artifacts.values(), *copies)
        heads = (each for each in made if isinstance(each, Decoder | FeatureHead))
        return [*self.decoders.values(), *heads]

    @property
    def heads(self) -> dict[str, Decoder | FeatureHead]:
        """The trained modules that can be run forward, by their names in traces."""
        made = self._artifacts.values()
        return {each.name: each for each in made if isinstance(each, Decoder | FeatureHead)}

    def cost(self, model: str, rows: int, *step: int) -> float:
        """Relative time of a forward; raises MethodFault where none was measured. See `costs`."""
        if self.costs is None:
            raise MethodFault(
                "this run knows no costs of forwards",
                "a method that asks for them says so (`Method.uses_costs`)",
            )
        return self.costs(model, rows, *step)

    def reserve(self, capacity: int) -> None:
        """Make room for longer sequences; drops the states that are too small."""
        if capacity > self.capacity:
            self.capacity = capacity
            self._states.clear()

    def state(
        self, decoder: Decoder, slack: int, index: int, slots: int = 1, slot: int = 0
    ) -> State:
        """The index-th cleared state of a decoder, made at first use and kept.

        Args:
            seats: sequences that are held together, of which `seat` says which; their rows lie
                beside each other where the decoder's states can.
        """
        states, key = self._states.setdefault(decoder, {}), (slack, index, slots)
        if key not in states:
            room = self.capacity + slack
            pool = decoder.new_state(room, slots)
            if slots == 1:
                states[key] = [pool]
            elif isinstance(pool, KVState):
                states[key] = [pool.line(each) for each in range(slots)]
            else:
                states[key] = [decoder.new_state(room) for _ in range(slots)]
        state = states[key][slot]
        state.clear()
        return state

    def close(self) -> None:
        """End the workers; nothing is left of them."""
        self.transport.close()

    @property
    def recorded(self) -> int:
        """How many forwards its models have recorded so far, to be replayed."""
        parts = [*self.decoders.values(), *self._artifacts.values()]
        return sum(part.recorded for part in parts if isinstance(part, Decoder))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held."""
        parts = [*self.decoders.values(), *self._artifacts.values()]
        return sum(part.weight_bytes for part in parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states preallocated so far."""
        held = (states for own in self._states.values() for states in own.values())
        return sum(state.nbytes for states in held for state in states)


class StateAllocator:
    """The states that one request holds: each is lent once.

    Called with a decoder, and rows of its state beyond the longest sequence.

    Args:
        seats: sequences that are held together; seat: this one's among them.
    """

    def __init__(self, workspace: Workspace, slots: int = 1, slot: int = 0) -> None:
        self._workspace = workspace
        self._slots, self._slot = slots, slot
        self._num_allocated: dict[tuple[Decoder, int], int] = {}
        self._states: list[State] = []

    def __call__(self, decoder: Decoder, slack: int) -> State:
        key = (decoder, slack)
        index = self._num_allocated[key] = self._num_allocated.get(key, -1) + 1
        state = self._workspace.state(decoder, slack, index, self._slots, self._slot)
        self._states.append(state)
        return state

    def release(self) -> None:
        """Give back the memory of all that was lent; who held it has come to an end."""
        for state in self._states:
            if isinstance(state, KVState):
                state.free()
