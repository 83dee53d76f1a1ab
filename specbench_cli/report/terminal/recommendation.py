"""Recommendation of `specbench recommend` as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specbench_cli import output

WIDTH = 100
MAX_CANDIDATES = 8
"""Maximum number of candidates that are shown. `--json` has all of them."""


def print_recommendation(found: Mapping[str, Any]) -> None:
    """Print a result, in the form of `recommendation.json`, to stdout."""
    lines = [*found["header"], "", *_verdict(found), "", *_search(found), *_modelled(found)]
    wrapped = [part for line in lines for part in output.wrap(line, WIDTH, "", "  ") or [""]]
    output.data(
        "\n".join(
            output.escape_hidden(line) for line in [*wrapped, *_launch_commands(found)]
        ).rstrip()
    )


def _verdict(found: Mapping[str, Any]) -> Iterator[str]:
    best, n = found["recommended"], found["held_out"]["prompts"]
    if best is None:
        yield f"recommended: none; {found['why']}"
    else:
        yield f"recommended: {_format_speedup(best)} on {n} held-out prompts"
        yield f"  {found['command']}"
        yield f"  outputs: {_outputs(best)}"
    if found["lossy"] is not None:
        lossy = found["lossy"]
        score = _format_score(lossy)
        yield f"lossy, as requested: {_format_speedup(lossy)}; score minus vanilla's {score}"


def _format_speedup(row: Mapping[str, Any]) -> str:
    return (
        f"{row['label']}, {row['speedup']:.2f}x"
        f" [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}] over vanilla"
    )


def _outputs(row: Mapping[str, Any]) -> str:
    counts = [
        (row["identical"], "identical"),
        (row["near_tie"], "near-tie"),
        (row["unchecked"], "unchecked (sampled: `specbench audit` tests their distribution)"),
    ]
    text = ", ".join(f"{n} {word}" for n, word in counts if n)
    bound = row["mismatch_bound"]
    return text + (f"; mismatches at most {bound:.1%} at 95%" if bound is not None else "")


def _format_score(row: Mapping[str, Any]) -> str:
    if row["score_difference"] is None:
        return "not known"
    ends = f"[{row['score_difference_low']:+.3f}, {row['score_difference_high']:+.3f}]"
    return f"{row['score_difference']:+.3f} {ends}"


def _search(found: Mapping[str, Any]) -> Iterator[str]:
    trials = sorted(found["search"], key=lambda each: (-each["rounds"], -(each["ratio"] or 0.0)))
    yield f"search: {len(trials)} candidates, {found['rounds']} rounds, {found['spent_s']:.0f} s"
    width = max((len(each["label"]) for each in trials[:MAX_CANDIDATES]), default=0)
    for each in trials[:MAX_CANDIDATES]:
        ratio = "-" if each["ratio"] is None else f"{each['ratio']:.2f}x"
        text = f"{each['prompts']} prompts, {each['rounds']} rounds"
        yield f"  {each['label']:<{width}}  {ratio:>6}  {text}"
    if len(trials) > MAX_CANDIDATES:
        more = len(trials) - MAX_CANDIDATES
        yield f"  and {more} more, slower or dropped earlier (--json lists them)"
    for each in trials:
        if each["out"]:
            yield f"  dropped: {each['label']}: {each['out']}"
    if found["left_out"]:
        yield f"  cannot run here: {', '.join(found['left_out'])} (--json has the reasons)"
    if found["untried"]:
        yield f"  no time for: {', '.join(found['untried'])}"


def _modelled(found: Mapping[str, Any]) -> Iterator[str]:
    modelled = found["modelled"]
    if not (modelled["batches"] or modelled["elsewhere"] or modelled["missing"]):
        return
    yield ""
    for each in modelled["batches"]:
        yield f"modelled: {each['label']} at batch {each['batch']}: {each['speedup']:.2f}x"
    for each in modelled["elsewhere"]:
        yield f"modelled: {each['label']} on {each['machine']}: {each['speedup']:.2f}x"
    for what, why in modelled["missing"].items():
        yield f"not modelled: {what}: {why}"


def _launch_commands(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["lines"]:
        return
    unsupported = [each for each in found["lines"] if each["lacks"]]
    for each in found["lines"]:
        if each["lacks"]:
            continue
        yield ""
        yield from output.wrap(f"{each['engine']}, {each['version']}", WIDTH)
        if not each["confirmed"]:
            text = (
                f"  does not support {_chosen_label(found)}; {each['of']} was fast in the search:"
            )
            yield from output.wrap(text, WIDTH, "", "  ")
        if each["note"]:
            yield from output.wrap(f"  ({each['note']})", WIDTH, "", "  ")
        yield from (f"    {line}" for line in each["text"].splitlines())
    if unsupported:
        yield ""
        words = "; ".join(f"{each['engine']} {each['lacks']}" for each in unsupported)
        yield from output.wrap(f"no command: {words}", WIDTH)


def _chosen_label(found: Mapping[str, Any]) -> str:
    chosen = found["recommended"] or found["lossy"]
    return str(chosen["label"])
