"""A session: all that a method may touch while it decodes one request.

It holds the text and its one stop rule, the drafts made for it, the target behind a meter, the one
verifier and the two sources of chance, each a part of its own. Requests come as a tuple because
batches will; today it holds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine.drafts import Drafts, check_rows
from specbench_cli.engine.models.decoder import Decoder, LogitsAt, Part, State
from specbench_cli.engine.models.head import Trained
from specbench_cli.engine.models.meter import Meter, Metered
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.scoring import Partial, Scoring
from specbench_cli.engine.sequence import Finish, Recording, StopRule, Text
from specbench_cli.engine.types import (
    Draft,
    Features,
    Forward,
    Law,
    Origin,
    Out,
    Outcome,
    Sublayer,
    Tokens,
)
from specbench_cli.engine.verify import decide, ranking
from specbench_cli.engine.verify.choosing import Chooser, Pick
from specbench_cli.engine.verify.random import Random, SeededRandom
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.engine.verify.tree import tree_of
from specbench_cli.engine.workers.drafter import Brief, Drafter
from specbench_cli.engine.workers.transport import Hiring, Worker
from specbench_cli.engine.workspace import Loans, Workspace
from specbench_cli.errors import MethodFault


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `ids` are the prompt's tokens, template included."""

    prompt_id: str
    turn: int
    ids: tuple[int, ...]
    stop: StopRule


@dataclass(frozen=True, slots=True)
class Shared:
    """What the sessions of a batch have in common, a trace and a lender of states, and the place of
    one among them."""

    meter: Meter
    lend: Loans
    place: int


class Session:
    """One request being decoded by one method.

    Attributes:
        requests: what is decoded (one request today).
        target: the target behind a meter; its forwards count as verification.
        sampling: the decoding rule.
        pass_: which pass of the run this is, from 1; under rejection another pass draws anew.
        chooser: how draft tokens are chosen.
        meter: the trace of all forwards.
        memory: what the method keeps between prompts when its state scope is "run".
        reference: vanilla's output, for methods that say they are an `upper_bound`; else None.
        workers: the drafters at work beside the target.

    With a `recording`, its tokens decide in place of the target (`replay`).
    """

    def __init__(
        self,
        workspace: Workspace,
        request: Request,
        sampling: Sampling,
        *,
        pass_: int = 1,
        memory: dict[str, Any] | None = None,
        random: Random | None = None,
        recording: Sequence[int] | None = None,
        reference: Sequence[int] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self._workspace = workspace
        decoder = self._decoder("target")
        self.device = decoder.device
        self.meter = Meter(self.device) if shared is None else shared.meter
        self._lend = workspace.loans() if shared is None else shared.lend
        self._place = None if shared is None else shared.place
        self._own_chance = random is None
        self.workers: list[Worker] = []
        self._taken = 0
        self.requests = (request,)
        self.sampling = sampling
        self.pass_ = pass_
        self.memory = {} if memory is None else memory
        self.reference = reference
        self.chooser = Chooser(
            sampling,
            random
            or SeededRandom(sampling.seed, request.prompt_id, request.turn, pass_, self.device),
            Noise(sampling.seed, request.prompt_id, request.turn, decoder.vocab_size, self.device),
            decoder.vocab_size,
        )
        self._text = Text(request.ids, request.stop, self.device)
        self._drafts = Drafts(self._text, self.chooser)
        self.target = Metered(decoder, self.meter, role="verify", place=self._place)
        state = self.new_state(self.target)
        self._scoring = Scoring(self.target, state, self._text, self._place or 0)
        self._recording = None if recording is None else Recording(recording, self.device)
        self.begin()

    def begin(self) -> None:
        """Start the timer: the ids are on the device, the states cleared and preallocated."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.meter.clock.restart()
        self._text.start()

    # ---- what there is --------------------------------------------------------------------------

    def draft(self, name: str = "draft") -> Metered:
        """Another decoder of the run, behind the meter; its forwards count as drafting."""
        return Metered(self._decoder(name), self.meter, role="draft", place=self._place)

    def partial(
        self,
        layers: tuple[int, int] | None = None,
        skip: Iterable[int | Sublayer] = (),
        *,
        keep: bool = False,
    ) -> Partial:
        """Some of the target as a draft model; its forwards count as drafting, by their share.

        On `session.state` it needs no prefill: it reads the target's own rows of the text. What it
        writes there is forgotten before the target scores. It can have a state of its own too.

        Args:
            layers: half-open range of those that run; default: all. An early exit is (0, E), and
                (E, F) goes on from `Hidden` rows that leave it.
            skip: what is passed over: layers, or sublayers as (layer, "attention"), (layer, "mlp").
            keep: whether the target's next score goes on from what (0, E) made of the tokens
                scored, which costs one wait for the device.
        Raises:
            MethodFault: the target has no such layers.
        """
        meter, place = self.meter, self._place
        over = frozenset(skip)
        return Partial(self._scoring, meter, layers=layers, skip=over, keep=keep, place=place)

    def new_state(self, decoder: Metered, slack: int = 0) -> State:
        """A cleared state, preallocated for the longest sequence of the run plus `slack` rows."""
        return self._lend(decoder.decoder, slack)

    def reserve(self, nodes: int) -> None:
        """Have rows in the target's state for trees of so many nodes; only before prefill."""
        self._drafts.slack = nodes
        self._scoring.state = self.new_state(self.target, nodes)

    def hire(self, kind: type[Drafter], params: MethodParams) -> Worker:
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
            self.pass_,
            request.ids,
            self.sampling,
            self._workspace.capacity,
            self.target.vocab_size,
        )
        chooser = None if self._own_chance else self.chooser
        worker = self._workspace.transport.hire(
            Hiring(
                kind,
                params,
                brief,
                self._workspace.decoders,
                self._workspace.recipes,
                self.meter,
                self._lend,
                chooser,
            )
        )
        self.workers.append(worker)
        return worker

    def artifact(self, wanted: Trained) -> Any:
        """A trained module of the run; one that is a decoder comes behind the meter, as a draft."""
        made = self._workspace.artifact(wanted)
        if not isinstance(made, Decoder):
            return made
        return Metered(made, self.meter, role="draft", place=self._place)

    def verify_cost(self, rows: int) -> float:
        """Time of a target forward over so many rows, the root's included, as a multiple of that
        over one; measured, and the same for all of a run. Needs `Method.uses_costs`."""
        return self._workspace.cost("target", rows)

    def draft_cost(self, model: Metered, rows: int = 1) -> float:
        """Time of a draft model's or head's forward, in that of a target forward over one row; of
        a part of the target, its share of a whole forward's."""
        return model.portion * self._workspace.cost(model.name, rows)

    def tap(self, taps: Sequence[int]) -> None:
        """Have the target's forwards keep a head's features (see `Head.taps`); before prefill."""
        self._scoring.tap(taps)

    def module(self, name: str) -> Any:
        """transformers' own module of a decoder; for peers."""
        if self._workspace.modules is None:
            raise MethodFault(f"this run holds no transformers module of {name!r}")
        return self._workspace.modules(name)

    @property
    def tokenizer(self) -> Any:
        """transformers' own tokenizer of the target; for peers."""
        return self._workspace.tokenizer

    def tokens(self, seq: int = 0) -> Sequence[int]:
        """All ids so far: the prompt and what was committed. Read only."""
        return self._text.tokens

    def output(self, seq: int = 0) -> Sequence[int]:
        """The committed ids."""
        return self._text.output

    @property
    def origin(self) -> Sequence[Origin]:
        """How each committed token came to be."""
        return self._text.origin

    @property
    def finish(self) -> Finish | None:
        """Why the output ended; None while it has not."""
        return self._text.finish

    @property
    def state(self) -> State:
        """The target's state, of which `score` writes and `commit` keeps rows; `partial` drafts
        behind them."""
        return self._scoring.state

    @property
    def started_ns(self) -> int:
        """When the timer was started."""
        return self._text.started_ns

    @property
    def first_ns(self) -> int:
        """When the first token was there."""
        return self._text.first_ns

    @property
    def last_ns(self) -> int:
        """When the latest tokens were there."""
        return self._text.last_ns

    def room(self, seq: int = 0) -> int:
        """Most draft levels of use: the remaining budget, less the token that verification adds."""
        return self._text.room

    def since(self, length: int, seq: int = 0) -> Tokens:
        """The committed tokens that a state of `length` rows has not seen."""
        return self._text.since(length)

    def unread(self, length: int, seq: int = 0) -> Features:
        """What a head whose state has `length` rows has not read: the committed tokens from
        `length` + 1 on, each beside the target's features of the token before it.

        After prefill that is all of the prompt but its first token, and the first committed one.

        Raises:
            MethodFault: `tap` was not called.
        """
        return self._scoring.features(self.since(length + 1))

    def chain(self, ids: Sequence[int]) -> Draft:
        """A chain of tokens chosen without a draw.

        Raises:
            MethodFault: an id outside the target's vocabulary.
        """
        return self._drafts.chain(ids)

    def tree(self, ids: Sequence[int], parents: tuple[int, ...]) -> Draft:
        """A tree of tokens chosen without a draw; `parents` as in `Draft`.

        Raises:
            MethodFault: an id outside the target's vocabulary.
        """
        return self._drafts.tree(ids, parents)

    def delivered(self, ids: Sequence[int], q: Tensor | None) -> Draft:
        """A chain that a worker drew, token after token.

        Args:
            ids: its tokens.
            q: [m, V], the laws that they were drawn from; None where they were chosen without.
        Raises:
            MethodFault: an id outside the target's vocabulary, or q of another shape.
        """
        return self._drafts.delivered(ids, q)

    # ---- laws and chance ------------------------------------------------------------------------

    @property
    def random(self) -> Random:
        """The primitives `categorical` and `bernoulli`."""
        return self.chooser.random

    def warp(self, rows: Tensor) -> Tensor:
        """The laws that logits [..., V] stand for under this session's temperature and cuts."""
        return self.chooser.warp(rows)

    def noise(self, first: int, n: int = 1, seq: int = 0) -> Tensor:
        """Keyed noise of output positions first..first+n-1, [n, V]; the same for every method."""
        return self.chooser.noise(first, n)

    def scores(self, rows: Tensor, first: int, depths: Sequence[int] | None = None) -> Tensor:
        """Decision scores of logits [n, V] at output positions first...: their argmax is the
        choice.

        Args:
            depths: how far behind `first` each row stands; default: one after another.
        """
        return self.chooser.scores(rows, first, depths)

    def pick(self, out: Out, ahead: int = 0) -> Pick:
        """Draw a draft token from the last row of a draft model's logits, as the rule asks.

        Args:
            out: a forward's result; its vocabulary agrees with the target's where they overlap.
            ahead: how many draft tokens stand between the last committed token and this one.
        Returns:
            (token [1] int64, q [1, V] or None): q where verification needs the law drawn from.
        """
        return self._drafts.pick(out, ahead)

    def drawn(self, picks: Sequence[Pick]) -> Draft:
        """The chain that consecutive `pick`s make."""
        return self._drafts.drawn(picks)

    def branch(
        self, rows: Tensor, width: int, *, how: Law = "iid", ahead: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Choose the children of draft nodes of one level, as the rule asks.

        Where tokens are drawn, `how` says how: "iid" and "wor" draw from the draft's law, "point"
        takes the likeliest tokens. Greedy and coupled decoding take those of the best scores.

        Args:
            rows: [r, V'] logits of a draft model at the r nodes.
            width: children of each node; best first.
            ahead: how many draft tokens stand between the last committed token and the children.
        Returns:
            (tokens [r, width] int64, q [r, V] or None): q where verification needs the law.
        """
        return self.chooser.branch(rows, width, self._text.position + ahead, how)

    def candidates(
        self, rows: Tensor, width: int, *, ahead: int | Sequence[int] = 0
    ) -> tuple[Tensor, Tensor]:
        """The best children of draft nodes, without a draw, and how good they are.

        Args:
            rows: [r, V'] logits of a draft model at the r nodes.
            width: children of each node; best first.
            ahead: how many draft tokens stand between the last committed token and the children;
                for each node, or the same for all.
        Returns:
            (tokens, values), [r, width] each: int64, and the log-softmax of the scores that the
            session decides by.
        """
        depths = [ahead] * rows.shape[0] if isinstance(ahead, int) else ahead
        return self.chooser.candidates(rows, width, self._text.position, depths)

    def ranked(
        self, rows: Tensor, width: int, *, ahead: int | Sequence[int] = 0
    ) -> tuple[list[list[int]], list[list[float]]]:
        """As `candidates`, on the host; waits for the device."""
        depths = [ahead] * rows.shape[0] if isinstance(ahead, int) else ahead
        return self.chooser.ranked(rows, width, self._text.position, depths)

    # ---- the target's steps ---------------------------------------------------------------------

    def part(
        self,
        x: Tokens | Features,
        state: State,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        logits_at: LogitsAt = "last",
    ) -> Part:
        """What this sequence brings to a draft model's forward that all of a batch share
        (`Metered.forward_batch`); arguments as of `Decoder.forward`."""
        return Part(x, state, positions, mask, logits_at, self._place or 0)

    def prefill(self) -> None:
        """Run the prompt through the target and commit the first token."""
        self.begun(self._scoring.forward(self.since(self._scoring.ready()), None, "last"))

    def begun(self, logits: Tensor) -> None:
        """Commit the first token, of logits [1, V] behind the prompt."""
        self._scoring.keep(range(len(self._text.tokens)))
        first = self._decide(self.chain(()), logits)
        self._text.append(replace(first, origin=("prefill",)))

    def score(self, draft: Draft) -> Tensor:
        """One target forward over the last committed token and a draft: logits [m + 1, V].

        Raises:
            MethodFault: the draft is malformed; says the step, the field and what is allowed.
        """
        x = self._drafts.rows(draft, self._scoring.ready(keep=True))
        return self._scoring.forward(x, draft, "all")

    def brings(self, draft: Draft | None) -> Part:
        """What `score` of a draft, or `prefill` (None), would compute, for a forward of the target
        that all of a batch share."""
        if draft is None:
            return self._scoring.part(self.since(self._scoring.ready()), None, "last")
        x = self._drafts.rows(draft, self._scoring.ready())
        return self._scoring.part(x, draft, "all")

    def takes(self, out: Out) -> Tensor:
        """Logits of what became of `brings`, as of `score`."""
        return self._scoring.take(out)

    @property
    def taps(self) -> Sequence[int]:
        """The target's layers that `tap` asked for."""
        return self._scoring.layers

    def begin_score(self, draft: Draft, layer: int) -> Tensor:
        """The first `layer` layers of `score`: early logits [m + 1, V], read as if they were all.

        They may steer what is prepared, and decide nothing. `end_score` runs the rest.

        Raises:
            MethodFault: as `score`; or the target has no such layer.
        """
        x = self._drafts.rows(draft, self._scoring.ready())
        return self._scoring.begin(x, draft, layer)

    def end_score(self) -> Tensor:
        """The layers that `begin_score` left: logits [m + 1, V], those of `score`."""
        return self._scoring.end()

    def verify(self, draft: Draft, rows: Tensor) -> Outcome:
        """Decide a draft from the target's logits [m + 1, V] at its root and nodes.

        Without the last node's row, [m, V], all m tokens of a chain are tested all the same, and no
        bonus follows where all of them stand.

        Raises:
            MethodFault: another number of rows.
        """
        if rows.shape[0] != draft.nodes + 1:
            self._drafts.checked(check_rows, draft, rows.shape[0])
        return self._decide(draft, rows)

    def commit(self, outcome: Outcome) -> Outcome:
        """Take an outcome: cut it by the stop rule, append it, keep its rows of the target's state.

        Returns:
            the outcome as far as it was committed; `finish` is set if the output ends here.
        """
        committed = self._text.append(outcome)
        # Rows: the root's and the drafted tokens', but for the last committed token, which roots
        # the next.
        nodes = committed.path[: len(committed.committed) - 1]
        self._scoring.keep((0, *(node + 1 for node in nodes)))
        return committed

    def adopt(self, outcome: Outcome) -> Outcome:
        """Take what a peer decoded with its own means; cut and appended, no state is touched.

        A peer tells its steps once it has all of them: they arrived with the first one told.
        """
        first = self._text.position == 0
        arrived = self.last_ns
        kept = self._text.append(outcome)
        if not first:
            self._text.last_ns = arrived
        return kept

    def forwards(self) -> Sequence[Forward]:
        """The forwards since the last call, for the step that they led to."""
        first, self._taken = self._taken, len(self.meter.forwards)
        return self.meter.forwards[first:]

    # ---- inside ---------------------------------------------------------------------------------

    def _decoder(self, name: str) -> Decoder:
        decoder = self._workspace.decoders.get(name)
        if decoder is None:
            raise MethodFault(f"this run has no decoder called {name!r}")
        return decoder

    def _decide(self, draft: Draft, rows: Tensor) -> Outcome:
        tree = None if draft.parents is None else tree_of(draft.parents, draft.order)
        if self._recording is not None:
            levels = range(rows.shape[0]) if tree is None else (0, *tree.depths)
            choices = self._recording.choices(self._text.position, levels)
            outcome, self._text.root = decide.chosen(draft, tree, choices)
        elif self.sampling.draws:
            try:
                outcome, self._text.root = decide.drawn(
                    draft, tree, self.warp(rows), self.random, self.sampling.rule
                )
            except ArithmeticError:
                self._drafts.inspected(draft)
                raise
        else:
            depths = None if tree is None else (0, *tree.depths)
            scores = self.scores(rows, self._text.position, depths)
            outcome, self._text.root = decide.chosen(draft, tree, ranking.argmax(scores))
        return outcome
