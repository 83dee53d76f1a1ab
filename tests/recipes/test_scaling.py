"""`python -m recipes.studies scaling`: scaling laws of trained drafts and of batch sizes."""

import json
import math
from types import SimpleNamespace

import pytest

from recipes.studies import commands, points
from recipes.studies.laws import fit_scaling_laws, predict_size
from recipes.studies.numbers import number, short
from recipes.studies.points import RECORD, ScalingPoint, read_points
from specbench_cli import app
from specbench_cli.errors import ExitCode, UsageError

SIZES = (1e5, 3e5, 1e6, 3e6)


def write_drafts(tmp_path, sizes=SIZES, layers=(1, 2), seeds=2, **rest):
    """Write drafts as the recipe `grid` does.

    alpha = 0.1 + 0.1 log10(tokens / 10k) + 0.02 layers, MAT = 6 alpha. Seeds differ by 0.002.
    """
    for tokens in sizes:
        for depth in layers:
            for seed in range(seeds):
                alpha = 0.1 + 0.1 * math.log10(tokens / 1e4) + 0.02 * depth + 0.002 * seed
                folder = tmp_path / f"{depth}-layers-{short(tokens)}-seed-{seed}"
                folder.mkdir(parents=True)
                record = {"target": "t", "loss": "ce", "layers": depth, "tokens": tokens}
                record |= {"alpha": alpha, "mat": 6 * alpha, **rest}
                (folder / RECORD).write_text(json.dumps(record))
    (tmp_path / RECORD).write_text("[]")  # the table of `train draft`, not a draft
    return tmp_path


def test_each_scaling_law_varies_one_size_and_fixes_the_others(tmp_path):
    scaling_laws = fit_scaling_laws(read_points([str(write_drafts(tmp_path))]))
    found = [
        (scaling_law.figure, scaling_law.along, scaling_law.where, scaling_law.fit.n)
        for scaling_law in scaling_laws
    ]
    per_figure = [
        ("tokens", "layers 1", 8),
        ("tokens", "layers 2", 8),
        *(("layers", f"tokens {short(size)}", 4) for size in SIZES),
    ]
    assert found == [(name, *rest) for name in ("alpha", "mat") for rest in per_figure]
    assert all(scaling_law.fit.b.value == pytest.approx(0.1) for scaling_law in scaling_laws[:2])
    assert scaling_laws[6].fit.b.value == pytest.approx(0.6)


def test_the_largest_size_is_held_out_and_predicted_from_the_others(tmp_path):
    scaling_law, *_ = fit_scaling_laws(read_points([str(write_drafts(tmp_path))]))
    held_out = scaling_law.held_out
    assert (held_out.size, held_out.n, held_out.is_inside) == (3e6, 2, True)
    assert held_out.predicted.value == pytest.approx(held_out.value)
    assert held_out.decades_beyond == pytest.approx(math.log10(3))
    assert "0.48 decades beyond" in scaling_law.warnings[-1]
    bent = [
        ScalingPoint("", {"tokens": 10.0**at}, {"alpha": y}, {})
        for at, y in enumerate((0, 1, 2, 2))
    ]
    (scaling_law,) = fit_scaling_laws(bent)
    assert not scaling_law.held_out.is_inside


def test_a_too_distant_largest_size_is_not_held_out():
    distant = [ScalingPoint("", {"tokens": x}, {"alpha": x}, {}) for x in (1, 2, 3, 1000)]
    assert fit_scaling_laws(distant)[0].held_out is None


def test_drafts_with_other_losses_have_separate_scaling_laws(tmp_path):
    write_drafts(tmp_path / "text", layers=(2,))
    write_drafts(tmp_path / "kl", layers=(2,), loss="kl")
    scaling_laws = fit_scaling_laws(read_points([str(tmp_path)]))
    assert [scaling_law.where for scaling_law in scaling_laws[:2]] == ["loss kl", "loss ce"]
    assert len(scaling_laws) == 4


def test_an_extrapolated_prediction_has_a_note_and_more_than_a_decade_is_refused(tmp_path):
    scaling_laws = fit_scaling_laws(read_points([str(write_drafts(tmp_path))]))
    inside = predict_size(scaling_laws, "tokens", 2e6)
    assert {prediction.note for prediction in inside} == {""}
    outside = predict_size(scaling_laws, "tokens", 2e7)
    assert outside[0].predicted.value == pytest.approx(0.1 + 0.1 * math.log10(2e3) + 0.021)
    assert outside[0].note == "extrapolated by 0.82 decades"
    with pytest.raises(UsageError, match=r"1\.5 decades beyond") as caught:
        predict_size(scaling_laws, "tokens", 1e8)
    assert caught.value.hint == "--at tokens=30M"
    with pytest.raises(UsageError, match="no law over batch; there are laws over tokens, layers"):
        predict_size(scaling_laws, "batch", 4)


def test_runs_with_several_batch_sizes_are_points_by_batch(monkeypatch, tmp_path):
    rows = [
        SimpleNamespace(label=name, alpha=alpha, mat=3.0, tokens_per_s=None, broken=broken)
        for name, alpha, broken in (("sps", 0.7, False), ("pld", 0.4, True), ("vanilla", None, 0))
    ]

    def read(run):
        return SimpleNamespace(
            summary=SimpleNamespace(rows=rows), facts=SimpleNamespace(batch=run.batch)
        )

    for batch in (1, 2):
        (tmp_path / str(batch)).mkdir()
        (tmp_path / str(batch) / "manifest.json").write_text("{}")
    monkeypatch.setattr(points, "read_report_data", read)
    monkeypatch.setattr(points, "collect_facts", lambda run: {"seed": "0", "batch": str(run.batch)})
    monkeypatch.setattr(
        points.RunDir, "open", lambda path: SimpleNamespace(path=path, batch=int(path.name))
    )
    found = read_points([str(tmp_path / "1"), str(tmp_path / "2")])
    assert [(point.name, dict(point.sizes)) for point in found] == [
        ("sps", {"batch": 1.0}),
        ("sps", {"batch": 2.0}),
    ]
    assert [(scaling_law.figure, scaling_law.along) for scaling_law in fit_scaling_laws(found)] == [
        ("alpha", "batch"),
        ("mat", "batch"),
    ]


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.setenv("SPECBENCH_DEBUG", "")

    def run(*args):
        code = app._run(["scaling", *map(str, args)], commands.app, "recipes")
        return (code, *capsys.readouterr())

    return run


def test_the_command_prints_scaling_laws_and_writes_three_files(call, tmp_path):
    code, out, err = call(
        write_drafts(tmp_path / "grid"), "--at", "tokens=10M", "--out", tmp_path / "out"
    )
    assert code == ExitCode.OK
    assert "MAT" in out and "layers 2" in out and "10M" in out and "extrapolated" in out
    assert "warning: alpha along layers tokens 100k: R2" not in err
    page = (tmp_path / "out" / "scaling.md").read_text()
    assert page.startswith("# Scaling\n") and "| alpha | tokens | layers 1 | 8 |" in page
    facts = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert (len(facts["points"]), len(facts["laws"]), len(facts["asked"])) == (16, 12, 4)
    assert (tmp_path / "out" / "scaling.svg").stat().st_size > 10_000


def test_json_output_contains_numbers(call, tmp_path):
    _, out, _ = call(write_drafts(tmp_path), "--json")
    first = json.loads(out.splitlines()[0])
    assert first["b"] == pytest.approx(0.1) and first["b_low"] < 0.1 < first["b_high"]
    assert (first["held_out"], first["inside"]) == (3e6, True)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--at", "tokens=lots"], "'tokens=lots' must be one of tokens, layers, batch"),
        (["--at", "width=3"], "'width=3' must be one of"),
        (["--at", "tokens=-3"], "must be one of"),
    ],
)
def test_an_invalid_prediction_size_is_one_error(call, tmp_path, args, expected):
    code, _, err = call(write_drafts(tmp_path, sizes=SIZES[:2], seeds=1), *args)
    assert code == ExitCode.USAGE and expected in " ".join(err.split()) and "hint" in err


def test_folders_without_points_or_with_one_size_are_refused(call, tmp_path):
    code, _, err = call(tmp_path)
    assert code == ExitCode.USAGE and "contains neither a run nor drafts" in " ".join(err.split())
    code, _, err = call(write_drafts(tmp_path / "one", sizes=SIZES[:1], layers=(2,)))
    assert code == ExitCode.USAGE and "differ in only one of these sizes" in " ".join(err.split())
    for alpha in ('"high"', "1e400", "1" + "0" * 400, "NaN"):
        record = tmp_path / "one" / "2-layers-100k-seed-0" / RECORD
        record.write_text(f'{{"alpha": {alpha}}}')
        code, _, err = call(tmp_path / "one")
        assert code == ExitCode.USAGE and "no record of a draft's training" in " ".join(err.split())


@pytest.mark.parametrize("word", ["0.3M", "500k", "1.5B", "3e5", " 12 "])
def test_a_formatted_number_is_parsed_back(word):
    assert number(short(number(word))) == pytest.approx(number(word))


@pytest.mark.parametrize(("value", "expected"), [(100352, "100k"), (999_900, "1M"), (7, "7")])
def test_a_number_has_three_digits(value, expected):
    assert short(value) == expected
