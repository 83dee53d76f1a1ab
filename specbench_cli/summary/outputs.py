"""All outputs of one method, with the totals from which its metrics are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from specbench_cli.judge.broken import NearTieCounts, compute_likelihood_deviation
from specbench_cli.store.schema import BASELINE, LOSSLESS, Record, Steps
from specbench_cli.summary.evidence import Evidence
from specbench_cli.summary.speedups import Speedup

TEXT = "text"
"""Key in `Record.extra` if the engine reports no token ids, so that specbench tokenized its
text."""
_AUTHORS = ("draft", "target", "method")
TOKEN_COUNTS = (
    *(f"{author}_{fate}" for author in _AUTHORS for fate in ("kept", "discarded")),
    "scored",
)
"""Keys in `Record.extra` for the number of tokens by author, kept in the output or discarded."""
JUDGED_STEPS, ACCEPTED_STEPS = "spans", "stood"
"""Keys in `Record.extra` for the number of steps that a rule judged, and that it accepted."""
_RANDOM_RULE = "random("
"""Beginning of the name of a random accept rule in the manifest."""
COMPARED = ("greedy", "coupled")
"""Sampling modes whose outputs are compared token by token. A lossless method whose outputs were
not compared is not ranked."""
UNSCORED = "it is lossy, and fewer than two questions were scored"
"""Reason why a lossy method has no speedup."""
_WORST_FIRST = ("mismatch", "failed", "near-tie", "unchecked", "identical", "reference")


@dataclass(frozen=True, kw_only=True)
class MethodOutputs:
    """All outputs of one method in a run, or in one task family of the run.

    Attributes:
        records: Records of the method, at least one.
        wall, decoding: Measured speedups in wall time and in decode time.
        broken_why: What is wrong with the method's outputs. None if nothing is wrong.
        ties: Number of near-ties, observed and expected.
        evidence: Comparison of sampled outputs and scores with vanilla's.
        upper_bound: True if the method drafts from vanilla's output, so that it bounds the speedup.
        accept_rule: Lossy accept rule with its parameters. None if there is none.
        state_scope: How long the method keeps what it learns: for a "prompt", a "run" or a
            "corpus".
        baseline: Label of the method with which times are compared, usually vanilla.
        declared_control: True if the manifest declares the method as a control.
        constrained: True if a grammar constrains the outputs.
    """

    records: Sequence[Record]
    wall: Speedup
    decoding: Speedup
    broken_why: str | None
    ties: NearTieCounts
    evidence: Evidence
    upper_bound: bool = False
    accept_rule: str | None = None
    state_scope: str | None = None
    baseline: str = BASELINE
    declared_control: bool = False
    constrained: bool = False

    @property
    def first(self) -> Record:
        """First record. All records have the same label, method and parameters."""
        return self.records[0]

    @property
    def lossless(self) -> bool:
        """True if the method's guarantee is lossless."""
        return self.first.guarantee in LOSSLESS

    @property
    def control(self) -> bool:
        """True if the method is a control: it accepts tokens at random, for comparison with lossy
        methods.
        """
        rule = self.accept_rule
        return self.declared_control or (rule is not None and rule.startswith(_RANDOM_RULE))

    # ---- speedups --------------------------------------------------------------------------------

    def unless_withheld(self, measured: Speedup) -> Speedup:
        """Return a measured speedup, or a speedup without numbers if it must not be reported."""
        return measured if self._withheld_reason is None else Speedup(note=self._withheld_reason)

    @cached_property
    def _withheld_reason(self) -> str | None:
        """Reason to hide the speedup, or None.

        A speedup is hidden if outputs are wrong, not scored or not checked.
        """
        if self.broken_why is not None:
            return f"BROKEN: {self.broken_why}"
        score, unchecked = self.evidence.score, self.verdicts["unchecked"]
        if not self.lossless and (score is None or score.low is None):
            return UNSCORED
        if self.lossless and self.first.sampling in COMPARED and unchecked:
            return f"{unchecked} outputs were compared with nothing"
        return None

    # ---- verdicts --------------------------------------------------------------------------------

    @cached_property
    def worst(self) -> dict[tuple[str, int], str]:
        """(Prompt id, turn) -> worst verdict over the repeats. "failed" if no repeat
        has a verdict.
        """
        worst: dict[tuple[str, int], str] = {}
        for r in self.records:
            kind = r.verdict.kind if r.verdict is not None and r.error is None else "failed"
            at = r.prompt_id, r.turn
            worst[at] = min(kind, worst.get(at, kind), key=_WORST_FIRST.index)
        return worst

    @cached_property
    def verdicts(self) -> Counter[str]:
        """Number of outputs by verdict."""
        return Counter(self.worst.values())

    @cached_property
    def mismatched_questions(self) -> set[str]:
        """Ids of the questions with a mismatch."""
        return {prompt for (prompt, _), kind in self.worst.items() if kind == "mismatch"}

    @cached_property
    def checked_questions(self) -> set[str]:
        """Ids of the questions whose outputs were compared token by token."""
        good = ("identical", "near-tie")
        return {
            p for (p, _), kind in self.worst.items() if kind in good
        } | self.mismatched_questions

    @cached_property
    def deviation(self) -> tuple[float | None, float | None]:
        """Deviation of sampled outputs from the target's distribution, and its p-value."""
        return compute_likelihood_deviation(self.records) or (None, None)

    def reference_read(self) -> int:
        """Count the outputs of vanilla that were compared with transformers' own module."""
        read = {
            (r.prompt_id, r.turn)
            for r in self.records
            if r.verdict is not None and r.verdict.kind == "reference" and r.verdict.gap is not None
        }
        return len(read)

    def count_finished(self, word: str) -> int | None:
        """Count the outputs with a finish reason, such as "eos". Return None without a grammar."""
        return sum(r.finish == word for r in self.records) if self.constrained else None

    # ---- steps -----------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> list[Steps]:
        """Steps of each output that reports them."""
        return [r.steps for r in self.records if r.steps is not None]

    @cached_property
    def relaxing(self) -> list[Steps]:
        """Steps of each output that was decoded with a lossy accept rule."""
        return [s for s in self.steps if s.relaxed is not None]

    @cached_property
    def committed(self) -> list[int]:
        """For each output, the number of tokens that its steps committed."""
        return [sum(s.committed) for s in self.steps]

    @cached_property
    def counts(self) -> list[int]:
        """Number of steps, for each output."""
        return [len(s.committed) for s in self.steps]

    @cached_property
    def reported(self) -> Counter[str]:
        """Totals over outputs whose engine reports drafted and accepted tokens, but no steps.

        In every engine, a step commits the accepted draft tokens and one more token of the target.
        """
        totals = Counter[str]()
        for r in self.records:
            known = r.extra and {"drafted", "accepted"} <= r.extra.keys()
            if r.steps is None and r.n_tokens and r.extra and known:
                committed, accepted = r.n_tokens - 1, int(r.extra["accepted"])
                totals.update(
                    committed=committed,
                    steps=max(bool(committed), committed - accepted),
                    drafted=int(r.extra["drafted"]),
                    accepted=accepted,
                )
        return totals

    @cached_property
    def levels(self) -> int:
        """Number of drafted levels."""
        return total(s.levels for s in self.steps)

    @cached_property
    def nodes(self) -> int:
        """Number of drafted tokens."""
        return total(s.nodes for s in self.steps)

    @cached_property
    def tested_levels(self) -> int:
        """Number of drafted levels that verification reached. A level is a position of
        the draft.
        """
        return total(s.tested for s in self.steps)

    @cached_property
    def accepted(self) -> int:
        """Number of levels with an accepted draft token."""
        return total(s.accepted for s in self.steps)

    @cached_property
    def relaxed(self) -> int:
        """Number of levels whose token only the lossy accept rule accepted."""
        return total(s.relaxed or [] for s in self.relaxing)

    def mat(self) -> float | None:
        """Compute MAT: committed tokens per step, over the steps of all outputs."""
        reported = self.reported
        return ratio(
            sum(self.committed) + reported["committed"], sum(self.counts) + reported["steps"]
        )

    def mat_macro(self) -> float | None:
        """Compute MAT of each output, and return the mean."""
        pairs = zip(self.committed, self.counts, strict=True)
        return mean([tokens / count for tokens, count in pairs if tokens])

    def mat_full(self) -> float | None:
        """Compute MAT without the last step of each output, which may be cut."""
        last = sum(s.committed[-1] for s in self.steps if s.committed)
        return ratio(sum(self.committed) - last, sum(self.counts) - sum(map(bool, self.counts)))

    def acceptance_by_position(self) -> tuple[float, ...]:
        """Compute acceptance by level, from level 1.

        It is (steps that accepted the level) / (steps that drafted the level).
        """
        # Under a lossy rule, a level that only this rule accepts can precede an accepted level. So
        # read the accepted levels from the origins of the tokens.
        known = [
            (r.steps, r.origin if any(r.steps.relaxed or ()) else None)
            for r in self.records
            if r.steps is not None
        ]
        drafted = _count_steps_by_level(chain.from_iterable(steps.levels for steps, _ in known))
        first = chain.from_iterable(steps.accepted for steps, origin in known if origin is None)
        accepted = Counter(_count_steps_by_level(first))
        for steps, origin in known:
            if origin is not None:
                accepted.update(_accepted_levels(steps, origin))
        return tuple(accepted[level] / n for level, n in drafted.items())

    def rule_rate(self) -> float | None:
        """Compute the share of judged tokens or steps that a lossy accept rule accepted."""
        judged, stood = (
            sum((r.extra or {}).get(name, 0) for r in self.records)
            for name in (JUDGED_STEPS, ACCEPTED_STEPS)
        )
        if judged:
            return stood / judged
        asked = total(s.tested for s in self.relaxing) - total(s.accepted for s in self.relaxing)
        return ratio(self.relaxed, asked)

    @cached_property
    def token_accounting(self) -> dict[str, int]:
        """Number of tokens by author and use: as the method reports it, or from its steps."""
        counted = [r.extra for r in self.records if r.extra and "target_kept" in r.extra]
        if counted:
            totals = {
                name: int(sum(each.get(name, 0) for each in counted)) for name in TOKEN_COUNTS
            }
            return {k: n for k, n in totals.items() if n or not k.startswith("method")}
        known = [(r.steps, r.n_tokens or 0) for r in self.records if r.steps is not None]
        known = [(steps, n) for steps, n in known if steps.relaxed is not None]
        if not known:
            return {}
        stood = sum(sum(steps.accepted) + sum(steps.relaxed or ()) for steps, _ in known)
        return {
            "draft_kept": stood,
            "draft_discarded": sum(sum(steps.nodes) for steps, _ in known) - stood,
            "target_kept": sum(n for _, n in known) - stood,
        }

    def reuse_rate(self) -> float | None:
        """Compute the share of drafts prepared in advance that were used."""
        counted = Counter[str]()
        for r in self.records:
            if r.extra:
                counted.update(r.extra)
        return ratio(counted["reused"], counted["reused"] + counted["missed"])

    @cached_property
    def rates(self) -> tuple[float | None, float | None]:
        """Discard rate and verification rate.

        The discard rate is rejected draft tokens / tokens. The verification rate is target forwards
        / tokens.
        """
        discarded = verified = tokens = 0
        for r in self.records:
            if r.steps is not None and r.n_tokens:
                kept = sum(r.steps.accepted) + sum(r.steps.relaxed or ())
                forwards = r.target_forwards
                discarded += sum(r.steps.nodes) - kept
                verified += 1 + len(r.steps.levels) if forwards is None else forwards
                tokens += r.n_tokens
        return ratio(discarded, tokens), ratio(verified, tokens)

    def work(self) -> float | None:
        """Compute target forwards per token.

        A forward through a part of the target counts by the share of the weights that it reads.
        """
        known = [
            (r.target_equivalents, r.n_tokens)
            for r in self.records
            if r.target_equivalents is not None and r.n_tokens
        ]
        return ratio(sum(work for work, _ in known), sum(n for _, n in known))

    # ---- times -----------------------------------------------------------------------------------

    @cached_property
    def timed_records(self) -> list[Record]:
        """Records with a trusted time."""
        return [r for r in self.records if not r.void and r.error is None]

    @cached_property
    def shares(self) -> tuple[float | None, float | None, float | None]:
        """Shares of target, draft and host in decode time."""
        spent = np.zeros(3)
        for r in self.timed_records:
            if r.ns.verify is not None and r.ns.draft is not None and r.ns.host is not None:
                spent += r.ns.verify, r.ns.draft, r.ns.host
        if not spent.sum():
            return None, None, None
        target, draft, host = (spent / spent.sum()).tolist()
        return target, draft, host

    def learn_share(self) -> float | None:
        """Compute the share of wall time spent on learning, over outputs with a learning time."""
        spans = [
            (r.ns.learn, r.ns.total)
            for r in self.timed_records
            if r.ns.learn is not None and r.ns.total
        ]
        return ratio(sum(learn for learn, _ in spans), sum(total for _, total in spans))

    def tokens_per_s(self) -> float | None:
        """Compute tokens per second of wall time."""
        spans = [(r.n_tokens, r.ns.total) for r in self.timed_records if r.n_tokens and r.ns.total]
        return ratio(1e9 * sum(n for n, _ in spans), sum(ns for _, ns in spans))

    def ttft_ms(self) -> float | None:
        """Compute the median prefill time in milliseconds."""
        return percentile(
            [r.ns.prefill / 1e6 for r in self.timed_records if r.ns.prefill is not None], 50
        )

    @cached_property
    def ms_per_token(self) -> list[float]:
        """Decode time per token of each output, in milliseconds."""
        return [
            r.ns.decode / (r.n_tokens - 1) / 1e6
            for r in self.timed_records
            if r.ns.decode is not None and r.n_tokens is not None and r.n_tokens > 1
        ]

    def tokens_per_joule(self) -> float | None:
        """Compute tokens per joule. None if the energy of an output is unknown."""
        joules = [r.energy_j for r in self.timed_records]
        known = [each for each in joules if each is not None]
        if len(known) < len(joules) or sum(known) <= 0:
            return None
        return sum(r.n_tokens or 0 for r in self.timed_records) / sum(known)


def _count_steps_by_level(depths: Iterable[int]) -> dict[int, int]:
    """Return level -> number of drafts that are at least as deep, from level 1 to the deepest
    draft.

    Args:
        depths: Number of levels of each draft.
    """
    counts, found, n = Counter(depths), dict[int, int](), 0
    for level in range(max(counts, default=0), 0, -1):
        n += counts[level]
        found[level] = n
    return dict(sorted(found.items()))


def _accepted_levels(steps: Steps, origin: Sequence[str]) -> Iterable[int]:
    """Yield the numbers of the accepted levels, for all steps of an output.

    Args:
        origin: Origin of each token of the output, such as "accepted".
    """
    at = 1  # prefill commits the first token
    for committed in steps.committed:
        for level, word in enumerate(origin[at : at + committed], start=1):
            if word == "accepted":
                yield level
        at += committed


def total(lists: Iterable[list[int]]) -> int:
    """Return the sum of all numbers in some lists."""
    return sum(map(sum, lists))


def known_sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the counts that are not None; None if all are None."""
    known = [n for n in counts if n is not None]
    return sum(known) if known else None


def ratio(a: float, b: float) -> float | None:
    """Return a / b; None if b is 0."""
    return a / b if b else None


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None if there is no value."""
    return sum(values) / len(values) if values else None


def percentile(values: Sequence[float], q: float) -> float | None:
    """Return the q-th percentile; None if there is no value."""
    return float(np.percentile(values, q)) if values else None
