"""Tests of the frontier figure: accuracy against speed of lossy methods and random controls."""

from dataclasses import replace

import pytest

from specbench_cli.report.figures import frontier
from specbench_cli.store.schema import Params
from specbench_cli.summary.summary import summarise

EPSILONS = (0.05, 0.3)


@pytest.fixture
def make_summary(synthetic, manifest):
    """Return a function that summarises typical acceptance at two settings, with controls."""

    def make(*, scored=True):
        def fake(label, method):
            return synthetic.Fake(label, method, 5, 0.6, 1.2, 0.1, guarantee="quality_only",
                                  verdict="unchecked", relaxed=0.2)  # fmt: skip

        lossy = [fake(f"typical epsilon={e}", "typical") for e in EPSILONS]
        random = [fake(f"random for {each.label}", "random-accept") for each in lossy]
        records = synthetic.records([synthetic.vanilla, synthetic.sps, *lossy, *random], prompts=12)
        for record in records:
            index = int(record.prompt_id.partition("/")[2])
            is_wrong = record.label.startswith("random") and index % 3 == 0
            record.score = float(not is_wrong) if scored else None
            if record.label.startswith("random"):
                like = record.label.removeprefix("random for ")
                record.params = Params({}, {"length": 5, "like": like, "rate": 0.3})
        rows = [{"label": each.label, "control": True} for each in random]
        return summarise(records, manifest | {"rows": rows}, resamples=50)

    return make


def test_a_method_and_its_random_controls_are_two_lines(make_summary, check_legible):
    figure = frontier.draw(make_summary())
    (axes,) = figure.axes
    named = {each.get_label(): each for each in axes.containers[:-1]}
    assert list(named) == ["typical", "typical, at random"]
    plain, hollow = (each.lines[0] for each in named.values())
    assert plain.get_color() == hollow.get_color() and hollow.get_markerfacecolor() == "white"
    assert len(plain.get_xdata()) == len(hollow.get_xdata()) == 2
    assert all(plain.get_ydata() == 1) and all(hollow.get_ydata() < 1)
    assert axes.get_xlabel() == "speedup over vanilla"
    check_legible(figure)


def test_without_times_speed_is_tokens_per_forward(make_summary):
    summary = make_summary()
    lossy = tuple(replace(row, speedup=None) for row in summary.lossy)
    figure = frontier.draw(replace(summary, lossy=lossy))
    assert figure.axes[0].get_xlabel() == "tokens per target forward"
    plain = figure.axes[0].containers[0].lines[0]
    assert sorted(plain.get_xdata()) == sorted(
        row.per_forward for row in lossy if row.method == "typical"
    )


def test_with_partial_forwards_speed_is_tokens_per_work(make_summary):
    summary = make_summary()
    lossy = tuple(
        replace(row, speedup=None, work=row.verification_rate / 2) for row in summary.lossy
    )
    figure = frontier.draw(replace(summary, lossy=lossy))
    assert figure.axes[0].get_xlabel() == "tokens per work of a full target forward"
    plain = figure.axes[0].containers[0].lines[0]
    expected = sorted(2 * row.per_forward for row in lossy if row.method == "typical")
    assert sorted(plain.get_xdata()) == pytest.approx(expected)


def test_each_named_setting_is_a_line_and_random_ones_are_hollow(make_summary):
    summary = make_summary()
    settings = [{"fill": fill, "gate": gate, "head": "auto"}
             for fill in ("copy", "none") for gate in ("predictor", "random")]  # fmt: skip
    lossy = tuple(
        replace(
            summary.lossy[0], label=f"specee {index}", method="specee", control=False, params=each
        )
        for index, each in enumerate(settings)
    )
    axes = frontier.draw(replace(summary, lossy=lossy)).axes[0]
    named = {each.get_label(): each for each in axes.containers[:-1]}
    assert list(named) == ["specee copy", "specee copy, at random", "specee none",
                           "specee none, at random"]  # fmt: skip
    faces = [each.lines[0].get_markerfacecolor() for each in named.values()]
    assert [face == "white" for face in faces] == [False, True, False, True]


def test_without_scores_there_is_no_figure_and_no_speedup(make_summary):
    summary = make_summary(scored=False)
    assert frontier.draw(summary) is None
    assert {row.speedup for row in summary.lossy} == {None}
    assert all(
        "it is lossy, and fewer than two questions were scored" in row.speedup_note
        for row in summary.lossy
    )
