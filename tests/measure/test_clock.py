"""The clock of a cell, its forwards and its helpers, against methods that go past them."""

import time

import pytest

from methods.sps import Sps, SpsParams
from specbench_cli.audit.models.tiny import create_tiny_models
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models.meter import HostClock
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.measure.batch_measurement import BatchMeasurement
from specbench_cli.measure.measurement import Measurement
from specbench_cli.plan.method_run import MethodRun
from tests.audit.faults import clock


def cell(kind, place=0):
    models = create_tiny_models()
    method_run = MethodRun.from_method("sps", "sps", kind(SpsParams(length=2)), {})
    request = Request(f"tiny/{place}", 0, models.prompts[3], StopRule(frozenset(), 12))
    return Measurement(method_run, None, request, models.workspace, Sampling(), 1, Memory())


class Counted(Sps):
    """How often it decoded."""

    times = 0

    def generate(self, session):
        type(self).times += 1
        yield from super().generate(session)


@pytest.mark.parametrize("recorded", [0, 3])
def test_an_output_in_which_forwards_were_recorded_is_decoded_once_more(monkeypatch, recorded):
    monkeypatch.setattr(Counted, "times", 0)
    monkeypatch.setattr(Workspace, "recorded", property(lambda _: min(Counted.times, 1) * recorded))
    found = cell(Counted)
    found.measure()
    assert found.output.error is None
    assert Counted.times == (2 if recorded else 1)
    found.measure()
    assert Counted.times == (3 if recorded else 2)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (clock.RestartsTheHarness, "the timer of a request was started twice"),
        (clock.RestartsTheClock, "the timer was restarted"),
        (clock.SetsTheClockBack, "the timer was changed"),
        (clock.KnowsTheOutput, "the target ran"),
        (clock.DraftsPastTheMeter, "the draft ran"),
        (clock.HidesForwards, "some were not recorded"),
        (clock.WorksInTheBackground, "the method started 1 threads"),
        (clock.WorksInAProcess, "the method started 1 processes"),
    ],
)
def test_what_goes_past_the_clock_fails_its_cell(kind, says):
    found = cell(kind)
    found.measure()
    clock.WorksInTheBackground.quit.set()
    assert says in found.output.error


def test_a_clock_that_waits_keeps_a_core_at_work_for_as_long_as_asked():
    clock = HostClock()
    for ns in (200_000, 20_000_000):  # shorter than a product, and longer
        began, worked = clock.now_ns(), time.process_time_ns()
        clock.sleep(ns)
        assert ns <= clock.now_ns() - began
        assert time.process_time_ns() - worked > ns / 4  # a sleep takes next to none


class Slow(Sps):
    """Takes its time once its last token is out."""

    def generate(self, session):
        yield from super().generate(session)
        time.sleep(0.05)


@pytest.mark.parametrize("together", [False, True])
def test_a_cells_time_is_taken_from_outside_to_the_methods_end(together):
    cells = [cell(Sps if together else Slow, place) for place in range(1 + together)]
    before = time.perf_counter_ns()
    (BatchMeasurement(cells, len(cells), 256) if together else cells[0]).measure()
    passed = time.perf_counter_ns() - before
    for each in cells:
        assert each.output.error is None
        assert each.output.ns.total < passed
    if not together:
        assert cells[0].output.ns.total > 50e6
