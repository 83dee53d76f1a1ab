"""Tests that run the jq commands of docs/how-to/trackers.md on the JSON of a comparison."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from specbench_cli.comparison.compared_output import RowKey
from specbench_cli.comparison.outcome import Comparison, ComparisonFinding, RowOutcome
from specbench_cli.comparison.pages.as_dict import as_dict, trends_as_dict
from specbench_cli.comparison.trend import ChangePoint, TrendRun, Trends, TrendSeries

pytestmark = pytest.mark.jq

PAGE = Path(__file__).parents[2] / "docs/how-to/trackers.md"
COMMANDS = dict(re.findall(r"^## (.+?)\n.*?```bash\n(jq .+?)\n```", PAGE.read_text(), re.S | re.M))
KEY = RowKey("mini", "hf:assisted")
COMPARISON = Comparison(
    base="a",
    new="b",
    rows=(
        RowOutcome(
            key=KEY,
            outcome="mat",
            rule="exact",
            rule_reason="",
            pairs=2,
            findings=(
                ComparisonFinding(
                    outcome="mat", message="MAT 4.25 -> 3.75 (2%)", locations=("mini/qa/1 turn 1",)
                ),
                ComparisonFinding(outcome="faster", message="decoding takes 9% less"),
            ),
        ),
    ),
)
TRENDS = Trends(
    runs=(
        TrendRun("a", "2026-01-01T00:00:00+00:00", "aaaa"),
        TrendRun("b", "2026-01-02T00:00:00Z", "bbbb"),
    ),
    series=(
        TrendSeries(key=KEY, figure="decode speedup", values=(1.5, 1.25), noisy=True),
        TrendSeries(
            key=KEY,
            figure="MAT",
            values=(4.25, 3.75),
            noisy=False,
            changes=(ChangePoint(0, 1, 4.25, 3.75, 0),),
        ),
        TrendSeries(key=KEY, figure="acceptance", values=(0.5, None), noisy=False),
    ),
    left_out=(),
    level=0.05,
)


@pytest.fixture
def run_command(tmp_path):
    (tmp_path / "compare.json").write_text(json.dumps(as_dict(COMPARISON)))
    (tmp_path / "trends.json").write_text(json.dumps(trends_as_dict(TRENDS)))

    def run(title):
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", COMMANDS[title]],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    return run


def test_annotations_are_errors_for_failed_rows(run_command):
    assert run_command("GitHub annotations").splitlines() == [
        "::error title=mini hf%3Aassisted::mat: MAT 4.25 -> 3.75 (2%25) (mini/qa/1 turn 1)",
        "::notice title=mini hf%3Aassisted::faster: decoding takes 9%25 less",
    ]


def test_newest_figures_have_the_format_of_github_action_benchmark(run_command):
    assert json.loads(run_command("github-action-benchmark")) == [
        {"name": "mini hf:assisted decode speedup", "unit": "x vanilla", "value": 1.25},
        {"name": "mini hf:assisted MAT", "unit": "tokens/step", "value": 3.75},
    ]


def test_bencher_gets_one_measure_per_figure(run_command):
    measures = {"decode speedup": {"value": 1.25}, "MAT": {"value": 3.75}}
    assert json.loads(run_command("Bencher")) == {"mini hf:assisted": measures}


def test_openmetrics_are_grouped_by_metric_and_end_with_eof(run_command):
    assert run_command("OpenMetrics").splitlines() == [
        'specbench_mat{task="mini",method="hf:assisted"} 3.75',
        'specbench_decode_speedup{task="mini",method="hf:assisted"} 1.25',
        "# EOF",
    ]


def test_changes_are_printed_with_their_commits(run_command):
    columns = ["2026-01-02T00:00:00Z", "mini", "hf:assisted", "MAT", "4.25", "3.75", "aaaa", "bbbb"]
    assert run_command("Change points").split("\n")[0].split("\t") == columns
