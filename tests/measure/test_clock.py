"""Tests that a method cannot change or bypass the clock of a measurement."""

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


def make_measurement(kind, place=0):
    models = create_tiny_models()
    method_run = MethodRun.from_method("sps", "sps", kind(SpsParams(length=2)), {})
    request = Request(f"tiny/{place}", 0, models.prompts[3], StopRule(frozenset(), 12))
    return Measurement(method_run, None, request, models.workspace, Sampling(), 1, Memory())


class Counted(Sps):
    """A method that counts its decodings."""

    times = 0

    def generate(self, session):
        type(self).times += 1
        yield from super().generate(session)


@pytest.mark.parametrize("recorded", [0, 3])
def test_an_output_is_decoded_again_if_cuda_graphs_were_recorded(monkeypatch, recorded):
    monkeypatch.setattr(Counted, "times", 0)
    monkeypatch.setattr(Workspace, "recorded", property(lambda _: min(Counted.times, 1) * recorded))
    measurement = make_measurement(Counted)
    measurement.measure()
    assert measurement.output.error is None
    assert Counted.times == (2 if recorded else 1)
    measurement.measure()
    assert Counted.times == (3 if recorded else 2)


@pytest.mark.parametrize(
    ("kind", "message"),
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
def test_a_method_that_bypasses_the_clock_fails(kind, message):
    measurement = make_measurement(kind)
    measurement.measure()
    clock.WorksInTheBackground.quit.set()
    assert message in measurement.output.error


def test_a_waiting_clock_keeps_a_core_busy():
    clock = HostClock()
    for ns in (
        200_000,
        20_000_000,
    ):  # shorter and longer than the matrix product that keeps the core busy
        start, worked = clock.now_ns(), time.process_time_ns()
        clock.sleep(ns)
        assert ns <= clock.now_ns() - start
        assert time.process_time_ns() - worked > ns / 4  # sleeping would use almost no CPU time


class Slow(Sps):
    """A method that sleeps after its last token."""

    def generate(self, session):
        yield from super().generate(session)
        time.sleep(0.05)


@pytest.mark.parametrize("together", [False, True])
def test_the_time_of_a_measurement_includes_the_end_of_the_method(together):
    measurements = [
        make_measurement(Sps if together else Slow, place) for place in range(1 + together)
    ]
    before = time.perf_counter_ns()
    (
        BatchMeasurement(measurements, len(measurements), 256) if together else measurements[0]
    ).measure()
    elapsed = time.perf_counter_ns() - before
    for each in measurements:
        assert each.output.error is None
        assert each.output.ns.total < elapsed
    if not together:
        assert measurements[0].output.ns.total > 50e6
