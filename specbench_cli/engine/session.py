"""A session: all that a method may touch while it decodes one request.

It holds the committed tokens, the target behind a meter, the one verifier, the one stop rule and
the two sources of chance. Requests come as a tuple because batches will; today it holds one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from specbench_cli.engine import decide, host, proposal, ranking
from specbench_cli.engine.artifact import Trained
from specbench_cli.engine.choosing import Chooser, Pick
from specbench_cli.engine.decoder import Decoder, State
from specbench_cli.engine.head import Tape
from specbench_cli.engine.meter import Meter, Metered
from specbench_cli.engine.partial import Halves
from specbench_cli.engine.random import Random, SeededRandom
from specbench_cli.engine.replay import Recording
from specbench_cli.engine.sampling import Noise, Sampling
from specbench_cli.engine.stop import Finish, StopRule
from specbench_cli.engine.tree import rows_of, tree_of
from specbench_cli.engine.types import (
    Draft,
    Features,
    Forward,
    Law,
    Origin,
    Out,
    Outcome,
    Tokens,
)
from specbench_cli.engine.workers.drafter import Brief, Drafter
from specbench_cli.engine.workers.transport import Hiring, Worker
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault

if TYPE_CHECKING:
    from specbench_cli.engine.method import MethodParams


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `ids` are the prompt's tokens, template included."""

    prompt_id: str
    turn: int
    ids: tuple[int, ...]
    stop: StopRule


class Session:
    """One request being decoded by one method.

    Attributes:
        requests: what is decoded (one request today).
        target: the target behind a meter; its forwards count as verification.
        state: the target's state, of which `score` writes and `commit` keeps rows.
        sampling: the decoding rule.
        pass_: which pass of the run this is, from 1; under rejection another pass draws anew.
        chooser: how draft tokens are chosen.
        meter: the trace of all forwards.
        finish: why the output ended; None while it has not.
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
    ) -> None:
        target = workspace.decoders["target"]
        self._workspace = workspace
        self.meter = Meter(target.device)
        self._lend = workspace.loans()
        self._own_chance = random is None
        self.workers: list[Worker] = []
        self._taken = 0
        self.requests = (request,)
        self.sampling = sampling
        self.pass_ = pass_
        self.device = target.device
        self.memory = {} if memory is None else memory
        self.target = self._metered("target")
        self.state = self.new_state(self.target)
        self._recording = None if recording is None else Recording(recording, target.device)
        self.reference = reference
        self.chooser = Chooser(
            sampling,
            random
            or SeededRandom(sampling.seed, request.prompt_id, request.turn, pass_, target.device),
            Noise(sampling.seed, request.prompt_id, request.turn, target.vocab_size, target.device),
            target.vocab_size,
        )
        self._tokens = list(request.ids)
        self._prompt_length = len(request.ids)
        self._prompt = self._tensor(request.ids)
        self._nothing = self._tensor(())
        self._root: Tensor | None = None  # the last committed token, on the device
        self._slack = 0  # rows of the target's state beyond the longest sequence
        self._tape: Tape | None = None
        self._halves: Halves | None = None  # a forward of the target that is halted
        self._picks: list[Pick] = []
        self._sound: Draft | None = None  # a draft whose ids and law are this session's own
        self._line: tuple[int, Tensor, Tensor] | None = None  # see `_rooted`
        self._origin: list[Origin] = []
        self.finish: Finish | None = None
        self.begin()

    def begin(self) -> None:
        """Start the timer: the ids are on the device, the states cleared and preallocated."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.meter.clock.restart()
        self.started_ns = self.first_ns = self.last_ns = time.perf_counter_ns()

    # ---- what there is --------------------------------------------------------------------------

    def draft(self, name: str = "draft") -> Metered:
        """Another decoder of the run, behind the meter; its forwards count as drafting."""
        return self._metered(name)

    def new_state(self, decoder: Metered, slack: int = 0) -> State:
        """A cleared state, preallocated for the longest sequence of the run plus `slack` rows."""
        return self._lend(decoder.decoder, slack)

    def reserve(self, nodes: int) -> None:
        """Have rows in the target's state for trees of so many nodes; only before prefill."""
        self._slack = nodes
        self.state = self.new_state(self.target, nodes)

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
            Hiring(kind, params, brief, self._workspace, self.meter, self._lend, chooser)
        )
        self.workers.append(worker)
        return worker

    def artifact(self, wanted: Trained) -> Any:
        """A trained module of the run; one that is a decoder comes behind the meter, as a draft."""
        made = self._workspace.artifact(wanted)
        return Metered(made, self.meter, role="draft") if isinstance(made, Decoder) else made

    def verify_cost(self, rows: int) -> float:
        """Time of a target forward over so many rows, the root's included, as a multiple of that
        over one; measured, and the same for all of a run. Needs `Method.uses_costs`."""
        return self._workspace.cost("target", rows)

    def draft_cost(self, model: Metered, rows: int = 1) -> float:
        """Time of a draft model's or head's forward, in that of a target forward over one row."""
        return self._workspace.cost(model.name, rows)

    def tap(self, taps: Sequence[int]) -> None:
        """Have the target's forwards keep a head's features (see `Head.taps`); before prefill."""
        self._tape = Tape(self.target.decoder, taps)

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
        return self._tokens

    def output(self, seq: int = 0) -> Sequence[int]:
        """The committed ids."""
        return self._tokens[self._prompt_length :]

    @property
    def origin(self) -> Sequence[Origin]:
        """How each committed token came to be."""
        return self._origin

    def room(self, seq: int = 0) -> int:
        """Most draft levels of use: the remaining budget, less the token that verification adds."""
        return self.requests[seq].stop.max_new_tokens - self._position() - 1

    def since(self, length: int, seq: int = 0) -> Tokens:
        """The committed tokens that a state of `length` rows has not seen."""
        if self._root is None and length == 0:
            return Tokens(self._prompt[None])
        if self._root is not None and length == len(self._tokens) - 1:
            return Tokens(self._root[None])
        return Tokens(self._tensor(self._tokens[length:])[None])

    def unread(self, length: int, seq: int = 0) -> Features:
        """What a head whose state has `length` rows has not read: the committed tokens from
        `length` + 1 on, each beside the target's features of the token before it.

        After prefill that is all of the prompt but its first token, and the first committed one.

        Raises:
            MethodFault: `tap` was not called.
        """
        if self._tape is None:
            raise MethodFault("no features are kept: `session.tap` in `start` says of which layers")
        return Features(self.since(length + 1).ids, self._tape.read()[None])

    def chain(self, ids: Sequence[int]) -> Draft:
        """A chain of tokens chosen without a draw.

        Raises:
            MethodFault: an id outside the target's vocabulary.
        """
        self._checked(proposal.check_ids, ids, self.target.vocab_size)
        tokens = self._rooted(self._tensor([self._tokens[-1], *ids])) if ids else self._nothing
        self._sound = Draft(tokens)
        return self._sound

    def tree(self, ids: Sequence[int], parents: tuple[int, ...]) -> Draft:
        """A tree of tokens chosen without a draw; `parents` as in `Draft`.

        Raises:
            MethodFault: an id outside the target's vocabulary.
        """
        draft = self.chain(ids)
        self._sound = draft = Draft(draft.tokens, parents)
        return draft

    def delivered(self, ids: Sequence[int], q: Tensor | None) -> Draft:
        """A chain that a worker drew, token after token.

        Args:
            ids: its tokens.
            q: [m, V], the laws that they were drawn from; None where they were chosen without.
        Raises:
            MethodFault: an id outside the target's vocabulary, or q of another shape.
        """
        draft = self.chain(ids)
        if q is not None and self.sampling.draws:
            whole = (draft.nodes, self.target.vocab_size)
            self._checked(proposal.check_shape, q, whole)
            self._sound = draft = Draft(draft.tokens, law="iid", q=q)
        return draft

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
        pick = self.chooser.pick(cast(Tensor, out.logits)[:, -1], self._position() + ahead)
        self._picks.append(pick)
        return pick

    def drawn(self, picks: Sequence[Pick]) -> Draft:
        """The chain that consecutive `pick`s make."""
        if not picks:
            return self.chain(())
        root = self._root if self._root is not None else self._prompt[-1:]
        tokens = self._rooted(torch.cat([root, *[token for token, _ in picks]]))
        laws = [q for _, q in picks if q is not None]
        draft = Draft(tokens, law="iid", q=torch.cat(laws)) if laws else Draft(tokens)
        # Its own last picks need no inspection, which would be a second wait for the device.
        own = self._picks[-len(picks) :]
        if len(own) == len(picks) and all(map(is_, own, picks)):
            self._sound = draft
        return draft

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
        return self.chooser.branch(rows, width, self._position() + ahead, how)

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
        return self.chooser.candidates(rows, width, self._position(), depths)

    def ranked(
        self, rows: Tensor, width: int, *, ahead: int | Sequence[int] = 0
    ) -> tuple[list[list[int]], list[list[float]]]:
        """As `candidates`, on the host; waits for the device."""
        depths = [ahead] * rows.shape[0] if isinstance(ahead, int) else ahead
        return self.chooser.ranked(rows, width, self._position(), depths)

    # ---- the target's steps ---------------------------------------------------------------------

    def prefill(self) -> None:
        """Run the prompt through the target and commit the first token."""
        out = self._heard(self.since(0), logits_at="last")
        self._keep(range(self._prompt_length))
        first = self._decide(self.chain(()), cast(Tensor, out.logits)[0])
        self._append(replace(first, origin=("prefill",)))

    def score(self, draft: Draft) -> Tensor:
        """One target forward over the last committed token and a draft: logits [m + 1, V].

        Raises:
            MethodFault: the draft is malformed; says the step, the field and what is allowed.
        """
        x, how = self._rows(draft)
        return cast(Tensor, self._heard(x, **how, logits_at="all").logits)[0]

    def begin_score(self, draft: Draft, layer: int) -> Tensor:
        """The first `layer` layers of `score`: early logits [m + 1, V], read as if they were all.

        They may steer what is prepared, and decide nothing. `end_score` runs the rest.

        Raises:
            MethodFault: as `score`; or the target has no such layer.
        """
        x, how = self._rows(draft)
        taps = () if self._tape is None else self._tape.layers
        self._halves = Halves(self.target, self.state, layer, taps)
        return self._halves.begin(x, **how)

    def end_score(self) -> Tensor:
        """The layers that `begin_score` left: logits [m + 1, V], those of `score`."""
        if self._halves is None:
            raise MethodFault("`end_score` ends what `begin_score` began; nothing was begun")
        out, self._halves = self._halves.end(), None
        if self._tape is not None:
            self._tape.write(out)
        return cast(Tensor, out.logits)[0]

    def verify(self, draft: Draft, rows: Tensor) -> Outcome:
        """Decide a draft from the target's logits [m + 1, V] at its root and nodes.

        Without the last node's row, [m, V], all m tokens of a chain are tested all the same, and no
        bonus follows where all of them stand.

        Raises:
            MethodFault: another number of rows.
        """
        if rows.shape[0] != draft.nodes + 1:
            self._checked(proposal.check_rows, draft, rows.shape[0])
        return self._decide(draft, rows)

    def commit(self, outcome: Outcome) -> Outcome:
        """Take an outcome: cut it by the stop rule, append it, keep its rows of the target's state.

        Returns:
            the outcome as far as it was committed; `finish` is set if the output ends here.
        """
        committed = self._append(outcome)
        # Rows: the root's and the drafted tokens', but for the last committed token, which roots
        # the next.
        nodes = committed.path[: len(committed.committed) - 1]
        self._keep((0, *(node + 1 for node in nodes)))
        return committed

    def adopt(self, outcome: Outcome) -> Outcome:
        """Take what a peer decoded with its own means; cut and appended, no state is touched.

        A peer tells its steps once it has all of them: they arrived with the first one told.
        """
        first = self._position() == 0
        arrived = self.last_ns
        kept = self._append(outcome)
        if not first:
            self.last_ns = arrived
        return kept

    def forwards(self) -> Sequence[Forward]:
        """The forwards since the last call, for the step that they led to."""
        first, self._taken = self._taken, len(self.meter.forwards)
        return self.meter.forwards[first:]

    # ---- inside ---------------------------------------------------------------------------------

    def _metered(self, name: str) -> Metered:
        decoder = self._workspace.decoders.get(name)
        if decoder is None:
            raise MethodFault(f"this run has no decoder called {name!r}")
        return Metered(decoder, self.meter, role="verify" if name == "target" else "draft")

    def _heard(self, x: Tokens, **how: Any) -> Out:
        """A forward of the target, whose features are kept if a head wants them."""
        if self._tape is None:
            return self.target.forward(x, self.state, **how)
        out = self.target.forward(x, self.state, taps=self._tape.layers, **how)
        self._tape.write(out)
        return out

    def _rows(self, draft: Draft) -> tuple[Tokens, dict[str, Tensor]]:
        """What goes into a forward over the last committed token and a draft, once it is checked:
        ids, and of a tree positions and mask."""
        if draft is self._sound:
            if draft.nodes:
                self._checked(proposal.check_form, draft, self._bounds(), self.sampling.rule)
        else:
            self._checked(proposal.inspect, draft, self._bounds(), self.sampling.rule)
        self._picks.clear()
        length, drafted, line = self._line or (0, None, draft.tokens)
        if drafted is draft.tokens and length == len(self._tokens) == self.state.length() + 1:
            x = Tokens(line[None])
        else:
            root = self.since(self.state.length())
            x = Tokens(torch.cat((root.ids, draft.tokens[None]), 1)) if draft.nodes else root
        if draft.parents is None:
            return x, {}
        mask, depths = rows_of(draft.parents, self.device)
        return x, {"positions": (depths + (len(self._tokens) - 1))[None], "mask": mask}

    def _keep(self, path: Sequence[int]) -> None:
        """Keep, of the target's last forward, the rows at `path`."""
        self.state.commit(0, path)
        if self._tape is not None:
            self._tape.keep(path)

    def _position(self) -> int:
        return len(self._tokens) - self._prompt_length

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return host.ids(ids, self.device)

    def _rooted(self, line: Tensor) -> Tensor:
        """Draft tokens behind the last committed one, kept as they go into the target's forward."""
        tokens = line[1:]
        self._line = len(self._tokens), tokens, line
        return tokens

    def _checked(self, check: Callable[..., object], *args: object) -> None:
        """Run a check of a draft; its fault gets the number of the step."""
        try:
            check(*args)
        except MethodFault as fault:
            # Each step before this one, and prefill, ended in a token that was not drafted.
            step = sum(origin not in ("accepted", "relaxed") for origin in self._origin)
            raise MethodFault(f"step {step}, {fault.message}", fault.hint) from None

    def _bounds(self) -> proposal.Bounds:
        room = self.room()
        return proposal.Bounds(self.target.vocab_size, room, room + self._slack, self.device)

    def _decide(self, draft: Draft, rows: Tensor) -> Outcome:
        tree = None if draft.parents is None else tree_of(draft.parents, draft.order)
        if self._recording is not None:
            levels = range(rows.shape[0]) if tree is None else (0, *tree.depths)
            choices = self._recording.choices(self._position(), levels)
            outcome, self._root = decide.chosen(draft, tree, choices)
        elif self.sampling.draws:
            try:
                outcome, self._root = decide.drawn(
                    draft, tree, self.warp(rows), self.random, self.sampling.rule
                )
            except ArithmeticError:
                self._checked(proposal.inspect, draft, self._bounds(), self.sampling.rule)
                raise
        else:
            depths = None if tree is None else (0, *tree.depths)
            scores = self.scores(rows, self._position(), depths)
            outcome, self._root = decide.chosen(draft, tree, ranking.argmax(scores))
        return outcome

    def _append(self, outcome: Outcome) -> Outcome:
        kept, self.finish = self.requests[0].stop.cut(self.output(), outcome.committed)
        self._tokens.extend(outcome.committed[:kept])
        self._origin.extend(outcome.origin[:kept])
        self.last_ns = time.perf_counter_ns()
        if self._position() == kept:  # these are the first tokens
            self.first_ns = self.last_ns
        if kept == len(outcome.committed):
            return outcome
        return Outcome(
            path=outcome.path[:kept],
            committed=outcome.committed[:kept],
            origin=outcome.origin[:kept],
            tested=min(outcome.tested, kept),
        )
