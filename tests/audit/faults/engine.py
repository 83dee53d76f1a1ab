"""Faulty versions of functions of the engine. The audit must catch all of them."""

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
    """Return p, so that the replacement of a rejected token is drawn from all of p."""
    return p


_warp = Chooser.warp
_rejection = verify.rejection
_input_after_root = Scoring._input_after_root


def unwarped_bonus(self, rows):
    """Return p, with the last row computed without temperature and cuts."""
    p = _warp(self, rows).clone()
    if rows.shape[0] > 1:
        p[-1] = rows[-1].softmax(-1)
    return p


def one_uniform(tokens, q, p, random):
    """Use one random number for all tests of a draft.

    So k tokens are accepted with the minimum of their k probabilities.
    """
    if q is None or not len(tokens):
        return _rejection(tokens, q, p, random)
    at = tokens[:, None]
    ratio = (p[: len(tokens)].gather(1, at) / q.gather(1, at))[:, 0].clamp_max(1.0)
    least = F.pad(ratio.cummin(0).values, (1, 1), value=1.0)
    least[-1] = 0.0
    accepted = random.categorical(least[:-1] - least[1:])
    distribution = verify.residual(p[accepted], F.pad(q, (0, 0, 0, 1))[accepted])
    return accepted, random.categorical(distribution)


def accept_more_likely(tokens, q, p, random):
    """Accept a draft token if p >= q, without a random number."""
    if q is None or not len(tokens):
        return _rejection(tokens, q, p, random)
    at = tokens[:, None]
    likelier = p[: len(tokens)].gather(1, at) >= q.gather(1, at)
    accepted = likelier[:, 0].cumprod(0).sum()
    return accepted, random.categorical(p[accepted])


def next_rows(tokens, q, p, random):
    """Verify each draft token with the target's logits of the following position."""
    return _rejection(tokens, q, torch.cat((p[1:], p[-1:])), random)


def residual_bonus(tokens, q, p, random):
    """Draw the bonus token from the residual of the last draft token."""
    accepted, following = _rejection(tokens, q, p, random)
    if q is None or not len(tokens) or int(accepted) < len(tokens):
        return accepted, following
    return accepted, random.categorical(verify.residual(p[-1], q[-1]))


def ignores_q(tokens, q, p, random):
    """Verify drawn tokens as if the draft were deterministic.

    The output is still exact, but fewer tokens are accepted.
    """
    return _rejection(tokens, None, p, random)


# ---- in place of `Batch.score` ------------------------------------------------------------------

_score = Batch.score


def logits_of_next_sequence(self, drafts):
    """Return for each draft the logits of the next sequence with the same draft length."""
    rows = _score(self, drafts)
    return [
        next((r for r in (*rows[at + 1 :], own) if r.shape == own.shape), own)
        for at, own in enumerate(rows)
    ]


_prefill = Batch.prefill


def noise_of_the_first(self):
    """Use the sampling noise of the first sequence for the whole batch."""
    for each in self.sessions:
        each._chooser._noise = self.sessions[0]._chooser._noise
    _prefill(self)


_seat = Harness.set_states


def noise_of_previous_sequence(self, lend):
    """Use the noise of the sequence that had this batch slot before."""
    _seat(self, lend)
    state: Any = self._session.state
    chooser = self._session._chooser
    if self._session._place is not None:
        chooser._noise = state.__dict__.setdefault("noise", chooser._noise)


# ---- in place of `decide._list_origins`, and of `relaxed_mask` as the verifier calls it ----------


_masked = RequestGrammarMask.__call__


def masks_of_the_root(masking, rows, output, tokens, parents=None):
    """Mask all draft nodes with the grammar mask of the root."""
    forbidden = _masked(masking, torch.zeros_like(rows[:1]), output, ()).isinf()
    return rows.masked_fill(forbidden, -math.inf)


def all_accepted(path, relaxed):
    """Report relaxed tokens as accepted tokens."""
    return tuple("accepted" for _ in path)


def accept_rule_one_row_late(rule, p, draft, tree, random, **rest):
    """Ask the accept rule about each draft token with the logits of the following position."""
    return decide.relaxed_mask(rule, torch.cat((p[1:], p[-1:])), draft, tree, random, **rest)


# ---- in place of the generator ------------------------------------------------------------------


def one_number(self, a):
    """Use one random number for all trials."""
    u = torch.empty(1, dtype=a.dtype).uniform_(generator=self._generator)
    return (u < a).cumprod(0).bool()


@contextmanager
def one_generator():
    """Use one generator for all prompts, and never seed it again."""
    shared = torch.Generator().manual_seed(0)

    def init(self, *key):
        self._generator = shared

    with patch.object(SeededRandom, "__init__", init):
        yield


_seeded = SeededRandom.__init__


def one_pass(self, seed, prompt_id, turn, pass_, *rest):
    """Seed every pass as the first one."""
    _seeded(self, seed, prompt_id, turn, 1, *rest)


# ---- in place of `StopRule.truncate` and `Session.commit` ------------------------------------


def eos_last_only(self, output, new):
    """Look for EOS only as the last token of a block."""
    left = self.max_new_tokens - len(output)
    if len(new) <= left and new[-1] in self.eos:
        return len(new), "eos"
    return (left, "length") if len(new) >= left else (len(new), None)


def skips_rollback(self, seq, n, firm):
    """Do not roll back a recurrent state."""
    del self._snapshots[seq][:-1]


def reads_the_root_alone(self, x, draft):
    """Feed a recurrent target only the last of the committed tokens that it has not read."""
    return _input_after_root(self, Tokens(x.ids[:, -draft.nodes - 1 :]), draft)


def keeps_the_rejected(self, outcome):
    """Keep the target's state of all tested tokens, the rejected one included."""
    committed = self._text.append(outcome)
    self._step_log.record_committed(committed)
    self.state.commit(0, range(committed.tested + 1))
    return committed
