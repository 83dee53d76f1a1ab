"""Summary of a run in three sentences, for the pages of a gallery."""

from __future__ import annotations

from specbench_cli.store.schema import BASELINE
from specbench_cli.summary import formats
from specbench_cli.summary.metrics import MethodSummary, same_group
from specbench_cli.summary.summary import Summary

_MAX_NAMED = 4
"""Maximum number of methods that a sentence names."""


def write_sentences(summary: Summary) -> tuple[str, str, str]:
    """Return sentences about the fastest method, the proof of its outputs, and its time."""
    return _fastest_sentence(summary), _proof_sentence(summary), _time_sentence(summary)


def _find_fastest(summary: Summary) -> MethodSummary | None:
    """Return the fastest lossless method of specbench's engine, or None. Vanilla does not count."""
    rows = [row for row in summary.lossless if row.speedup is not None and not row.engine]
    return next((row for row in rows if row.label != BASELINE and not row.upper_bound), None)


def _fastest_sentence(summary: Summary) -> str:
    best = _find_fastest(summary)
    questions = sum(summary.prompts.values())
    over = f"on {questions} {'question' if questions == 1 else 'questions'} of"
    in_processes = f"in {summary.passes} {'process' if summary.passes == 1 else 'processes'}"
    tasks = f"{over} {_join_words(list(summary.prompts))} {in_processes}"
    if best is None:
        return f"No lossless method has a speedup {tasks}."
    tied = same_group(best, summary.lossless)
    low, high = best.speedup_low, best.speedup_high
    interval = "" if low is None or high is None else f" (95% interval {low:.2f} to {high:.2f})"
    if low is not None and low <= 1 and high is not None:
        claim = (
            "comes first, but is slower than vanilla"
            if high < 1
            else "comes first, but does not differ significantly from vanilla"
        )
    else:
        claim = "has the highest speedup" if tied or low is None else "is the fastest"
    difference = ""
    if tied:
        difference = f", with no significant difference from {_join_words(tied)}"
    elif best.letters:
        difference = ", a significant difference from all others"
    return (
        f"Of the lossless methods {best.label} {claim} {tasks}: {formats.ratio(best.speedup)}"
        f" vanilla's speed{interval}{difference}."
    )


def _proof_sentence(summary: Summary) -> str:
    weakest = summary.proof()
    if weakest is None:
        return (
            "No output was compared token by token. An audit can prove the distribution of sampled"
            " outputs."
        )
    row, bound = weakest
    checked = sum(each.questions_checked > 0 and not each.peer for each in summary.lossless)
    rows = f"{checked} lossless {'method' if checked == 1 else 'methods'}"
    return (
        f"The outputs of {rows} were compared with vanilla's token by token. The weakest proof is"
        f" that of {row.label}: {row.questions_mismatched} of {row.questions_checked} questions"
        f" have a mismatch, so its mismatch rate is at most {100 * bound:.2g}%, at 95% confidence."
    )


def _time_sentence(summary: Summary) -> str:
    best = _find_fastest(summary)
    if best is None:
        return "It is not known how a method spends its time."
    parts = []
    if best.mat is not None:
        parts.append(f"commits {best.mat:.2f} tokens per step")
    if best.acceptance_rate is not None:
        parts.append(f"accepts {best.acceptance_rate:.0%} of the levels that it drafts")
    shares = (best.share_target, best.share_draft, best.share_host)
    if None not in shares:
        target, draft, host = (f"{share:.0%}" for share in shares if share is not None)
        parts.append(
            f"spends {target} of its decode time on the target, {draft} on drafting and {host} on"
            " the host"
        )
    if not parts:
        return f"{best.label} does not report its steps."
    return f"{best.label} {_join_words(parts)}."


def _join_words(words: list[str]) -> str:
    """Join words by commas and "and". A long list ends with the number of further words."""
    if len(words) > _MAX_NAMED:
        words = [*words[: _MAX_NAMED - 1], f"{len(words) - _MAX_NAMED + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
