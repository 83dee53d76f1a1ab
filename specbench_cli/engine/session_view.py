"""View that a method has of a request: its text, the run's models, and the random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.learning import Memory, make_trainable
from specbench_cli.engine.models.artifact import Trained
from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.meter import Meter, Metered, MeteredHead
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.request import BatchSlot, Request
from specbench_cli.engine.sequence import Finish, Text
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.choosing import Chooser
from specbench_cli.engine.verify.random import Random, SeededRandom
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.engine.workers.drafter import Brief, Drafter
from specbench_cli.engine.workers.transport import Hiring, Worker
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault


class SessionView:
    """Request with its text and the run's models, states and random numbers.

    Nothing here changes the text. A method gets a `Session`, which adds the drafts and the steps.

    Args:
        pass_: Number of the repeat, from 1.
        random: Random numbers. None means those of seed, prompt and repeat.
        shared: Its batch. None means that it is decoded alone.

    Attributes:
        requests: the requests to decode (always one).
        target: the metered target. Its forwards count as verification.
        device: the target's device.
        sampling: the decoding rule.
        memory: data that the method keeps between prompts if its state scope is "run".
    """

    _allocate_state: Callable[[Decoder, int], State]  # makes a cleared state with rows to spare

    def __init__(
        self,
        workspace: Workspace,
        request: Request,
        sampling: Sampling,
        *,
        pass_: int = 1,
        memory: Memory | None = None,
        random: Random | None = None,
        shared: BatchSlot | None = None,
    ) -> None:
        self._workspace, self._pass = workspace, pass_
        decoder = self._decoder("target")
        self.device = decoder.device
        self._meter = meter = Meter(self.device) if shared is None else shared.meter
        self._place = place = None if shared is None else shared.place
        self._workers: list[Worker] = []
        self._random_is_seeded = random is None
        self.requests = (request,)
        self.sampling = sampling
        self.memory = Memory() if memory is None else memory
        self.target = Metered(decoder, meter, role=workspace.role, place=place)
        self._text = Text(request.ids, request.stop, self.device, meter.clock.now)
        size = workspace.output_vocab_size or decoder.vocab_size
        key = sampling.seed, request.prompt_id, request.turn
        self._noise = Noise(*key, size, self.device)
        random = random or SeededRandom(*key, pass_, self.device)
        self._chooser = Chooser(sampling, random, self._noise, size)

    # ---- the text -------------------------------------------------------------------------------

    @property
    def vocabulary(self) -> Vocabulary:
        """What the target's ids stand for, as bytes (`decode`), and how a text is cut into them.

        Raises:
            MethodFault: its tokenizer spells in a way that is not known here.
        """
        return self._workspace.vocabulary()

    def tokens(self) -> Sequence[int]:
        """All ids so far: the prompt and what was committed. Read only."""
        return self._text.tokens

    def output(self) -> Sequence[int]:
        """The committed ids."""
        return self._text.output

    @property
    def finish(self) -> Finish | None:
        """Why the output ended; None while it has not."""
        return self._text.finish

    def max_draft_length(self) -> int:
        """Most draft levels of use: the remaining budget, less the token that verification adds."""
        return self._text.max_draft_length

    def pending_tokens(self, length: int) -> Tokens:
        """The committed tokens that a state of `length` rows has not seen."""
        return self._text.pending_tokens(length)

    # ---- models and states ----------------------------------------------------------------------

    def draft(self, name: str = "draft") -> Metered:
        """Another decoder of the run, behind the meter; its forwards count as drafting."""
        return Metered(self._decoder(name), self._meter, role="draft", place=self._place)

    def new_state(self, decoder: Metered, slack: int = 0) -> State:
        """A cleared state, preallocated for the longest sequence of the run plus `slack` rows."""
        state = self._allocate_state(decoder.decoder, slack)
        source = self.requests[0].source
        if source is not None:
            read = decoder.decoder.attach(state, source)
            if not read and decoder.decoder is self._decoder("target"):
                raise MethodFault(
                    f"{decoder.name} reads text alone, and the request holds more beside it"
                )
        return state

    def start_worker(self, kind: type[Drafter], params: MethodParams) -> Worker:
        """A drafter that works beside the target, where the run has it work; its prefill has begun.

        Args:
            kind: its class, at the top level of a module.
            params: the method's, handed on to it.
        Raises:
            WorkerLost: its process does not start.
        """
        request = self.requests[0]
        brief = Brief(
            request.prompt_id,
            request.turn,
            self._pass,
            request.ids,
            # What drafts there is not processed.
            replace(self.sampling, processor=None, contrast=None),
            self._workspace.capacity,
            self.target.vocab_size,
            request.source,
        )
        chooser = None if self._random_is_seeded else self._chooser
        worker = self._workspace.transport.hire(
            Hiring(
                kind,
                params,
                brief,
                self._workspace.decoders,
                self._workspace.decoder_factories,
                self._meter,
                self._allocate_state,
                chooser,
            )
        )
        self._workers.append(worker)
        return worker

    def artifact(self, wanted: Trained) -> Any:
        """A trained module of the run; a head comes behind the meter, as a draft."""
        made = self._workspace.artifact(wanted)
        if isinstance(made, FeatureHead):
            return MeteredHead(made, self._meter, place=self._place)
        if not isinstance(made, Decoder):
            return made
        return Metered(made, self._meter, role="draft", place=self._place)

    def trainable(self, wanted: str | Trained = "draft", topic: str = "") -> Any:
        """This row's own copy of a decoder of the run, behind the meter as a draft, or of a trained
        module: made at first use and kept, so `start` should ask for it; needs a `state_scope`.

        Its weights are the parameters of its `module`, which is called as transformers' are,
        `module(ids).logits`. They change in `Method.learn` and nowhere else, none come or go, and a
        request is decoded by those that it began with.

        Args:
            topic: of a row that has a copy for each topic, whose it is.
        Raises:
            MethodFault: there is no such decoder, or it has no torch module.
        """
        if isinstance(wanted, str):
            source: Any = self._decoder(wanted)
        else:
            source = self._workspace.artifact(wanted)
        make = partial(make_trainable, source, self._workspace.decoders.values())
        made = self.memory.get_copy((wanted, topic), make)
        if wanted == "target":
            made.name = "target's copy"  # whose forwards are none of the target's
        if not isinstance(made, Decoder):
            return made
        return Metered(made, self._meter, role="draft", place=self._place)

    def verify_cost(self, rows: int) -> float:
        """Time of a target forward over so many rows, the root's included, as a multiple of that
        over one; measured, and the same for all of a run. Needs `Method.uses_costs`."""
        return self._workspace.cost("target", rows)

    def draft_cost(self, model: Metered | MeteredHead, rows: int = 1) -> float:
        """Time of a draft model's or head's forward, in that of a target forward over one row; of
        a part of the target, its share of a whole forward's."""
        return model.portion * self._workspace.cost(model.name, rows)

    # ---- distributions and random numbers -------------------------------------------------------

    @property
    def random(self) -> Random:
        """The primitives `categorical` and `bernoulli`."""
        return self._chooser.random

    def warp(self, rows: Tensor) -> Tensor:
        """The distributions [..., V] that logits stand for under this session's temperature and
        cuts."""
        return self._chooser.warp(rows)

    def noise(self, first: int, n: int = 1) -> Tensor:
        """Keyed noise of output positions first..first+n-1, [n, V]; the same for every method."""
        return self._chooser.noise(first, n)

    def scores(self, rows: Tensor, first: int, depths: Sequence[int] | None = None) -> Tensor:
        """Decision scores of logits [n, V] at output positions first...: their argmax is the
        choice.

        Args:
            depths: how far behind `first` each row stands; default: one after another.
        """
        return self._chooser.scores(rows, first, depths)

    # ---- inside ---------------------------------------------------------------------------------

    def _decoder(self, name: str) -> Decoder:
        decoder = self._workspace.decoders.get(name)
        if decoder is None:
            raise MethodFault(f"this run has no decoder called {name!r}")
        return decoder
