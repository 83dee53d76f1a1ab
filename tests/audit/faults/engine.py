"""Functions of the engine with one thing wrong: what the audit must catch."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from specbench_cli.engine.batch import Batch
from specbench_cli.engine.scoring import Scoring
from specbench_cli.engine.session import Harness
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify import chain as verify
from specbench_cli.engine.verify import decide
from specbench_cli.engine.verify.choosing import Chooser
from specbench_cli.engine.verify.grammar import RequestGrammarMask
from specbench_cli.engine.verify.random import SeededRandom

# ---- in place of `Chooser.warp`, `verify.rejection` and `verify.residual` -----------------------


def residual_from_p(p, q):
    """The token in place of a rejected one from the target's whole distribution."""
    return p


_warp = Chooser.warp
_rejection = verify.rejection
_apart = Scoring._input_after_root


def unwarped_bonus(self, rows):
    """The last of a step's rows without temperature and cuts."""
    p = _warp(self, rows).clone()
    if rows.shape[0] > 1:
        p[-1] = rows[-1].softmax(-1)
    return p


def one_uniform(tokens, q, p, random):
    """All tests of a step with one random number: k stand with the least of their k chances."""
    if q is None or not len(tokens):
        return _rejection(tokens, q, p, random)
    at = tokens[:, None]
    ratio = (p[: len(tokens)].gather(1, at) / q.gather(1, at))[:, 0].clamp_max(1.0)
    least = F.pad(ratio.cummin(0).values, (1, 1), value=1.0)
    least[-1] = 0.0
    accepted = random.categorical(least[:-1] - least[1:])
    distribution = verify.residual(p[accepted], F.pad(q, (0, 0, 0, 1))[accepted])
    return accepted, random.categorical(distribution)


def likelier_stands(tokens, q, p, random):
    """A draft token stands where p exceeds q, without a draw."""
    if q is None or not len(tokens):
        return _rejection(tokens, q, p, random)
    at = tokens[:, None]
    stands = p[: len(tokens)].gather(1, at) >= q.gather(1, at)
    accepted = stands[:, 0].cumprod(0).sum()
    return accepted, random.categorical(p[accepted])


def next_rows(tokens, q, p, random):
    """Each draft token against the row of the one after it."""
    return _rejection(tokens, q, torch.cat((p[1:], p[-1:])), random)


def residual_bonus(tokens, q, p, random):
    """After full acceptance a residual too, from the last draft token's q."""
    accepted, following = _rejection(tokens, q, p, random)
    if q is None or not len(tokens) or int(accepted) < len(tokens):
        return accepted, following
    return accepted, random.categorical(verify.residual(p[-1], q[-1]))


def ignores_q(tokens, q, p, random):
    """Drawn tokens as if they had been chosen: the distribution is right, fewer stand."""
    return _rejection(tokens, None, p, random)


# ---- in place of `Batch.score` ------------------------------------------------------------------

_score = Batch.score


def rows_of_the_next(self, drafts):
    """Judges a draft by the rows of the next sequence whose draft is as long."""
    rows = _score(self, drafts)
    return [
        next((r for r in (*rows[at + 1 :], own) if r.shape == own.shape), own)
        for at, own in enumerate(rows)
    ]


_prefill = Batch.prefill


def noise_of_the_first(self):
    """Has all sequences of a batch decided with the noise of the first one."""
    for each in self.sessions:
        each._chooser._noise = self.sessions[0]._chooser._noise
    _prefill(self)


_seat = Harness.set_states


def chance_of_who_left(self, lend):
    """Has who joins a batch decided with the noise of who took the seat first."""
    _seat(self, lend)
    state: Any = self._session.state
    chooser = self._session._chooser
    if self._session._place is not None:
        chooser._noise = state.__dict__.setdefault("noise", chooser._noise)


# ---- in place of `decide._list_origins`, and of `relaxed_mask` as the verifier calls it ----------


_masked = RequestGrammarMask.__call__


def masks_of_the_root(masking, rows, output, tokens, parents=None):
    """All nodes of a draft masked as what follows the output."""
    forbidden = _masked(masking, torch.zeros_like(rows[:1]), output, ()).isinf()
    return rows.masked_fill(forbidden, -math.inf)


def all_accepted(path, relaxed):
    """Relaxed tokens as accepted ones."""
    return tuple("accepted" for _ in path)


def asked_a_row_late(rule, p, draft, tree, random, **beside):
    """Each draft token at its own row of the target, which is that of the token behind it."""
    return decide.relaxed_mask(rule, torch.cat((p[1:], p[-1:])), draft, tree, random, **beside)


# ---- in place of the generator ------------------------------------------------------------------


def one_number(self, a):
    """One random number for all trials."""
    u = torch.empty(1, dtype=a.dtype).uniform_(generator=self._generator)
    return (u < a).cumprod(0).bool()


@contextmanager
def one_generator():
    """One generator for all prompts, never seeded again."""
    shared = torch.Generator().manual_seed(0)

    def init(self, *key):
        self._generator = shared

    with patch.object(SeededRandom, "__init__", init):
        yield


_seeded = SeededRandom.__init__


def one_pass(self, seed, prompt_id, turn, pass_, *rest):
    """Every pass as the first."""
    _seeded(self, seed, prompt_id, turn, 1, *rest)


# ---- in place of `StopRule.truncate` and `Session.commit` ------------------------------------


def eos_last_only(self, output, new):
    """Looks for an EOS at the end of a block only."""
    room = self.max_new_tokens - len(output)
    if len(new) <= room and new[-1] in self.eos:
        return len(new), "eos"
    return (room, "length") if len(new) >= room else (len(new), None)


def returns_nowhere(self, seq, n, firm):
    """Leaves a recurrent state as the last forward left it."""
    del self._snapshots[seq][:-1]


def reads_the_root_alone(self, x, draft):
    """Of the committed tokens that a recurrent target lacks, reads the last one only."""
    return _apart(self, Tokens(x.ids[:, -draft.nodes - 1 :]), draft)


def keeps_the_rejected(self, outcome):
    """Keeps the target's rows of all tested tokens, the rejected one too."""
    committed = self._text.append(outcome)
    self._step_log.record_committed(committed)
    self.state.commit(0, range(committed.tested + 1))
    return committed
