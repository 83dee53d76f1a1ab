"""Progress of a run: the bar, the log, JSON events and the ETA."""

import json
import re
import threading
from pathlib import Path

import pytest

from specbench_cli.commands._progress import (
    NOISE_WARNING,
    BarDisplay,
    JsonDisplay,
    LiveSpeedups,
    LogDisplay,
    format_duration,
    format_progress,
    make_progress,
)
from specbench_cli.measure.eta import estimate_report_seconds
from specbench_cli.measure.quiet import TIMES_NOISY
from specbench_cli.measure.repeat_process import TUNING
from specbench_cli.measure.view import PromptProgress
from specbench_cli.store.schema import Ns
from tests.records import record_of

PLAN = {
    "target": "embedded-7m",
    "draft": "embedded-1m",
    "methods": [
        {"label": "vanilla", "method": "vanilla", "params": {}, "baseline": "vanilla"},
        {"label": "sps", "method": "sps", "params": {"length": 5}, "baseline": "vanilla"},
    ],
    "tasks": [{"name": "mini", "questions": 12, "prompts": 14}],
    "passes": 1,
    "cells": 28,
}


def record(label="sps", prompt="mini/1", ns=100, tokens=10, **changes):
    return record_of(label, prompt, tokens, **({"ns": Ns(total=ns), "other_cpu": 0.0} | changes))


def test_a_progress_bar_stops_while_another_process_shows_one(tmp_path, monkeypatch):
    stopped = []
    with BarDisplay() as bar:
        bar.started(3, 0, tmp_path)
        monkeypatch.setattr(bar._bar, "stop", lambda: stopped.append(True))
        bar.hand_over()
        assert stopped == [True]


def test_speedups_do_not_depend_on_the_order_of_methods():
    running = LiveSpeedups()
    running.add(record("sps", "a", ns=50))
    running.add(record("vanilla", "a", ns=100))
    running.add(record("vanilla", "b", ns=300))
    assert running.add(record("sps", "b", ns=150)) == {"sps": 400 / 200}


def test_methods_of_another_engine_are_compared_with_its_vanilla():
    running = LiveSpeedups({"fast": "plain", "plain": "plain"})
    for label, ns in {"fast": 40, "vanilla": 100, "sps": 50, "plain": 60}.items():
        found = running.add(record(label, ns=ns))
    assert found == {"sps": 2.0, "fast": 1.5}


def test_the_progress_line_names_the_best_speedups_and_counts_the_rest():
    view = LogDisplay()
    view.speedups = {f"m{n}": float(n) for n in range(1, 9)}
    assert view.line() == "m8 8.00x  m7 7.00x  m6 6.00x  m5 5.00x  m4 4.00x  m3 3.00x  and 2 slower"


def test_outputs_of_other_length_are_compared_per_token():
    running = LiveSpeedups()
    running.add(record("vanilla", ns=100, tokens=10))
    assert running.add(record("sps", ns=100, tokens=20)) == {"sps": 2.0}


@pytest.mark.parametrize(
    "fields", [{"void": True}, {"error": "boom"}, {"ns": None}, {"n_tokens": 0}]
)
def test_outputs_without_a_time_are_not_counted(fields):
    running = LiveSpeedups()
    running.add(record("vanilla"))
    assert running.add(record("sps", **fields)) == {}


def test_dry_run_prints_the_plan_as_its_result(capsys):
    LogDisplay(dry_run=True).planned(PLAN)
    lines = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert lines["methods"] == "vanilla; sps length=5"
    assert lines["tasks"] == "mini: 12 questions, 14 prompts"
    assert lines["cells"] == "28"


def test_plan_of_a_real_run_is_not_its_result(capsys):
    LogDisplay().planned(PLAN)
    assert capsys.readouterr().out == ""


def test_the_log_gets_one_line_per_stage_and_prompt(capsys):
    now = 0.0
    view = LogDisplay(clock=lambda: now, stamp=lambda: f"{now:.0f} s")
    view.started(4, 0, Path("runs/x"))
    view.stage("warming up 2 methods")
    view.show_record(record("vanilla", "a", ns=200))
    view.prompt(PromptProgress("", 1, 2, None))
    now = 9.0
    view.prompt(PromptProgress("", 1, 2, 30.0))  # the same prompt again, at once
    view.show_record(record("sps", "a", ns=100))
    view.window(0.62, "62% other CPU, repeat 2 of 3")
    now = 61.0
    view.prompt(PromptProgress("", 1, 2, 30.0))  # after some time the line is repeated
    view.prompt(PromptProgress("", 2, 2, None))
    view.note("something [odd]")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "0 s 4 outputs (prompts x methods x repeats), in runs/x",
        "0 s warming up 2 methods",
        "0 s prompt 1 of 2 done",
        "61 s prompt 1 of 2 done, about 30 s left  62% other CPU, repeat 2 of 3  sps 2.00x",
        "61 s prompt 2 of 2 done  62% other CPU, repeat 2 of 3  sps 2.00x",
        "something [odd]",
    ]


def test_the_advice_against_noise_is_printed_once_per_run(capsys):
    view = LogDisplay()
    for text in ("62% other CPU, repeat 2 of 3", "quiet", "62% other CPU, times kept"):
        view.window(0.5, text)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        view.window(0.62, f"62% other CPU, {TIMES_NOISY}")
    assert capsys.readouterr().err == f"{NOISE_WARNING}\n"
    LogDisplay(part=True).window(
        0.62, f"62% other CPU, {TIMES_NOISY}"
    )  # an earlier repeat has already printed the advice
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (59, "59 s"), (61, "1 min 1 s"), (3599, "1 h 0 min"), (11400, "3 h 10 min")],
)
def test_durations_are_rounded_for_people(seconds, text):
    assert format_duration(seconds) == text


def test_the_progress_line_names_the_part_that_its_eta_covers():
    assert format_progress(PromptProgress("pass 2 of 3", 5, 12, 42)) == (
        "pass 2 of 3, prompt 5 of 12 done, about 42 s left"
    )
    assert format_progress(PromptProgress("tuning", 1, 4, 9)).endswith("about 9 s left of tuning")
    assert format_progress(PromptProgress("", 0, 12, 42)) == "prompt 1 of 12, about 42 s left"


@pytest.mark.parametrize("part", ["", "pass 2 of 3"])
def test_the_eta_includes_the_report_except_while_tuning(part, capsys):
    view = JsonDisplay(start_s=6.0)
    view.planned(PLAN)
    for named in (part, TUNING):
        view.prompt(PromptProgress(named, 1, 4, 9.0))
    _, last, tuning = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["left_s"] == 9.0 + estimate_report_seconds(6.0, methods=2, outputs=28) > 9.0
    assert tuning["left_s"] == 9.0


def test_a_resumed_run_counts_the_stored_outputs(capsys):
    LogDisplay().started(10, 4, Path("runs/x"))
    line = r"\d\d:\d\d:\d\d 10 outputs \(prompts .*\), 4 of them already measured, in runs/x\n"
    assert re.fullmatch(line, capsys.readouterr().err)


def test_each_json_event_is_one_line(capsys):
    view = make_progress(json=True)
    view.planned(PLAN)
    view.started(2, 0, Path("runs/x"))
    view.show_record(record("vanilla"))
    view.show_record(record("sps", ns=50))
    view.stage("loading")
    view.prompt(PromptProgress("", 1, 2, 3.5))
    view.window(None, "other CPU unknown")
    plan, start, _, last, *others = map(json.loads, capsys.readouterr().out.splitlines())
    assert plan == {"event": "plan", **PLAN}
    assert start == {"event": "start", "run": "runs/x", "cells": 2, "done": 0}
    assert last["event"] == "cell"
    assert (last["done"], last["label"], last["speedups"]) == (2, "sps", {"sps": 2.0})
    assert last["verdict"]["kind"] == "identical"
    assert "output_ids" not in last
    assert others == [
        {"event": "stage", "stage": "loading"},
        {"event": "prompt", "part": "", "prompt": 1, "prompts": 2, "left_s": 3.5},
        {"event": "window", "other_cpu": None, "says": "other CPU unknown"},
    ]
    assert view.flags() == ["--json"]


@pytest.mark.parametrize("display", [LogDisplay, JsonDisplay])
def test_a_repeat_in_its_own_process_prints_no_plan(display, capsys):
    view = display(part=True)
    view.planned(PLAN)
    view.started(2, 0, Path("runs/x"))
    assert "".join(capsys.readouterr()) == ""


def test_bar_is_drawn_inside_the_callbacks_only(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    threads = threading.active_count()
    with make_progress(json=False) as view:
        assert isinstance(view, BarDisplay)
        view.started(2, 0, Path("runs/x"))
        assert threading.active_count() == threads
        view.show_record(record("vanilla"))
        capsys.readouterr()
        view.show_record(record("[b]sps", ns=50))
        assert "[b]sps 2.00x" in capsys.readouterr().err
        view.prompt(PromptProgress("", 5, 12, 40.0))
        assert "prompt 5 of 12 done, about 40 s left" in capsys.readouterr().err
        view.window(0.01, "quiet")
        assert "quiet" in capsys.readouterr().err
        view.note("above [b]it")
        assert "above [b]it" in capsys.readouterr().err
    assert threading.active_count() == threads


def test_the_log_display_is_used_if_stderr_is_not_a_terminal(capsys):
    assert isinstance(make_progress(json=False), LogDisplay)
