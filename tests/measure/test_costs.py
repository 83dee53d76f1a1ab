"""Tests of measured forward costs: interpolation, extrapolation, and the cost file."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.errors import UsageError
from specbench_cli.measure.costs import (
    SCHEMA,
    Costs,
    CostSetup,
    cache_path,
    check_writable,
    compare_probes,
    find_cached,
    interpolate,
)

TIMES = st.floats(1, 1e9)


@st.composite
def lines(draw, increasing=False):
    """Draw the points of a line. With `increasing`, the times do not decrease."""
    xs = sorted(draw(st.sets(st.integers(1, 200), min_size=2, max_size=8)))
    ys = draw(st.lists(TIMES, min_size=len(xs), max_size=len(xs)))
    return list(zip(xs, sorted(ys) if increasing else ys, strict=True))


def facts(ns=lambda n, context: 1000.0 * n + context, **changes):
    """Return the content of a cost file for a target and a draft model."""
    point = {"spread": 0.0, "samples": 3}
    curve = {
        "forwards": [
            {"n_tokens": n, "context": context, "ns": ns(n, context), **point}
            for n in (1, 4, 8)
            for context in (16, 64)
        ],
        "prefills": [{"n_tokens": n, "context": 0, "ns": 500.0 * n, **point} for n in (16, 64)],
    }
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "created_utc": "2026-11-21T12:00:00+00:00",
        "machine": {"id": "abc", "hardware": {"cpu": "some CPU", "accelerators": []}},
        "models": {
            "target": {"label": "big", "sha256": "aa", "n_layers": 8},
            "draft": {"label": "small", "sha256": "bb", "n_layers": 2},
        },
        "setup": {"device": "cpu", "dtype": "float32", "threads": 2},
        "seed": 0,
        "quietness": {"rounds": 3, "void": 0, "other_cpu": 0.01, "noisy": False},
        "curves": {"target": curve, "draft": curve},
        "host": {"step": 100.0, "draft": 10.0, "node": 1.0, "points": []},
    } | changes


def costs(**changes):
    return Costs.model_validate(facts(**changes))


@given(lines(), st.data())
def test_line_passes_through_its_points(line, data):
    x, y = data.draw(st.sampled_from(line))
    assert interpolate(line, x) == y


@given(lines(), st.data())
def test_value_between_two_points_is_between_their_values(line, data):
    index = data.draw(st.integers(0, len(line) - 2))
    (x0, y0), (x1, y1) = line[index : index + 2]
    y = interpolate(line, data.draw(st.floats(x0, x1)))
    assert min(y0, y1) * (1 - 1e-9) <= y <= max(y0, y1) * (1 + 1e-9)


@given(lines(increasing=True), st.floats(0, 400), st.floats(0, 400))
def test_interpolation_of_increasing_costs_is_monotonic(line, a, b):
    low, high = sorted((a, b))
    assert interpolate(line, low) <= interpolate(line, high) * (1 + 1e-9)


@given(lines(), st.floats(0, 1000))
def test_extrapolation_continues_the_last_slope_but_never_falls(line, more):
    (x0, y0), (x1, y1) = line[-2:]
    slope = max(0.0, (y1 - y0) / (x1 - x0))
    assert interpolate(line, x1 + more) == pytest.approx(y1 + slope * more)


@given(lines(), st.floats(0, 1))
def test_values_before_the_first_point_are_constant(line, share):
    assert interpolate(line, share * line[0][0]) == line[0][1]


@given(st.floats(1, 8), st.floats(16, 64))
def test_plane_is_interpolated_exactly(n, context):
    assert costs().curves["target"].ns(n, context) == pytest.approx(1000 * n + context)


def test_forwards_outside_the_grid_are_extrapolated_and_not_covered():
    found = costs()
    assert found.curves["target"].ns(12, 64) == pytest.approx(12_064)
    assert found.curves["target"].ns(4, 264) == pytest.approx(4_264)
    assert found.curves["target"].covers(8, 64)
    assert found.curves["target"].covers(1, 0)
    assert not found.curves["target"].covers(9, 64)
    assert not found.curves["target"].covers(8, 65)


def test_prefill_and_host_have_separate_costs():
    found = costs()
    assert found.curves["draft"].prefill_ns(32) == pytest.approx(16_000)
    assert found.host_ns(drafts=5, nodes=5) == 155
    assert found.host_ns(drafts=10, nodes=12, steps=3) == 412


def test_model_that_was_not_probed_is_a_key_error():
    with pytest.raises(KeyError):
        costs().curves["head"].ns(1, 16)


def test_a_saved_file_is_read_back_unchanged(tmp_path):
    found, path = costs(), tmp_path / "new" / "costs.json"
    found.save(path)
    assert Costs.load(path) == found
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]
    assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read costs from"),
        ("{", "is not a cost file"),
        ("[1]", "is not a cost file"),
        (
            '{"schema": 1, "curves": {}, "machine": {"id": "\\ud800"}}',
            "is not a cost file: 'utf-8'",
        ),
        ('{"schema": 1}', "is not a cost file"),
        (json.dumps(facts(schema=SCHEMA + 1)), f"reads schemas up to {SCHEMA}"),
        (json.dumps(facts(machine={"hardware": {"accelerators": ["x"]}})), "damaged: machine"),
        (json.dumps(facts(curves={"target": {"forwards": [], "prefills": []}})), "is damaged"),
        (json.dumps(facts(host={"step": -1, "draft": 0, "node": 0})), "host.step"),
        (json.dumps(facts(more=1)), "more"),
    ],
)
def test_file_without_valid_costs_is_rejected(tmp_path, text, message):
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        Costs.load(path)
    assert caught.value.hint


def test_file_that_cannot_be_written_is_detected_first(tmp_path):
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "new" / "costs.json")
    for path in (tmp_path / "file" / "costs.json", tmp_path):
        with pytest.raises(UsageError, match="cannot write"):
            check_writable(path)
    with pytest.raises(UsageError, match="cannot write"):
        costs().save(tmp_path / "file" / "costs.json")


def test_label_has_the_cpu_or_gpu_used():
    card = {"cpu": "some CPU", "accelerators": [{"name": "some GPU"}]}
    gpu = costs(
        machine={"id": "d", "hardware": card},
        setup={"device": "cuda", "dtype": "bfloat16", "threads": 2},
    )
    assert costs().label == "some CPU, cpu float32 2 threads"
    assert gpu.label == "some GPU, cuda bfloat16 2 threads"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specbench" / "costs"


def store(found):
    path = cache_path(found.machine["id"], found.models, found.setup)
    found.save(path)
    return path


def test_cached_costs_are_found_by_machine_models_and_setup(cache):
    found, setup = costs(), CostSetup(device="cpu", dtype="float32", threads=2)
    assert find_cached("abc", {"target": "aa"}, setup) is None
    assert store(found).parent == cache
    assert find_cached("abc", {"target": "aa", "draft": "bb"}, setup) == found
    assert find_cached("abc", {"target": "aa"}, setup) == found  # a run without a draft model
    assert find_cached("abd", {"target": "aa"}, setup) is None
    assert find_cached("abc", {"target": "ab"}, setup) is None
    assert find_cached("abc", {"target": "aa"}, setup.model_copy(update={"threads": 1})) is None


def test_newest_valid_cached_costs_are_used(cache):
    alone = {"target": {"label": "big", "sha256": "aa"}}
    newer = costs(models=alone, created_utc="2026-11-22T12:00:00+00:00")
    assert store(newer) != store(costs())
    (cache / "other.json").write_text("{")
    assert find_cached("abc", {"target": "aa"}, newer.setup) == newer


def test_cached_costs_with_the_heads_of_the_run_are_preferred(cache):
    setup = CostSetup(device="cpu", dtype="float32", threads=2)
    models = facts()["models"]
    heads = {"eagle3": {"label": "head", "sha256": "cc"}}
    with_head = costs(models=models | heads)
    store(with_head)
    newer = costs(created_utc="2026-11-22T12:00:00+00:00")
    store(newer)
    wanted = {"target": "aa", "draft": "bb"}
    assert find_cached("abc", wanted, setup) == newer
    assert find_cached("abc", wanted, setup, heads={"eagle3": "cc"}) == with_head
    assert find_cached("abc", wanted, setup, heads={"eagle3": "dd"}) == newer


def test_files_with_schema_1_are_readable():
    old = costs(schema=1)
    assert old.curves["target"].ns(4, 16, tree=True) == old.curves["target"].ns(4, 16)
    assert old.host_ns(2, 3, method="eagle3") == old.host_ns(2, 3)


def test_two_points_with_equal_coordinates_are_rejected():
    for points in ("forwards", "prefills"):
        duplicated = facts()
        duplicated["curves"]["target"] = json.loads(json.dumps(duplicated["curves"]["target"]))
        duplicated["curves"]["target"][points].append(duplicated["curves"]["target"][points][0])
        with pytest.raises(ValueError, match="with the same number of tokens"):
            Costs.model_validate(duplicated)


def test_a_head_has_its_own_host_costs():
    found = costs(hosts={"eagle3": {"step": 500.0, "draft": 20.0, "node": 2.0}})
    assert found.host_ns(2, 3, steps=4, method="eagle3") == 4 * 500 + 2 * 20 + 3 * 2
    assert found.host_ns(2, 3, steps=4) == 4 * 100 + 2 * 10 + 3 * 1


def test_differences_are_sorted_with_the_largest_first():
    slow = facts()
    slow["curves"]["target"] = json.loads(json.dumps(slow["curves"]["target"]))
    slow["curves"]["target"]["forwards"][2]["ns"] *= 1.5
    worst, *others = compare_probes(costs(), Costs.model_validate(slow))
    assert worst.name == "target, 4 tokens after 16"
    assert worst.relative == pytest.approx(0.5)
    assert {each.relative for each in others} == {0.0}
    assert len(others) == 2 * (6 + 2) - 1
