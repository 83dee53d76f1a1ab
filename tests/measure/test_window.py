"""Tests of measurement windows, with a simulated clock and noise meter."""

from specbench_cli.measure.quiet import MeasurementWindows


class SimulatedMeter:
    """A simulated clock and noise meter. `shares` is the other CPU use of each window in order."""

    def __init__(self, shares):
        self.now = 0.0
        self.shares = list(shares)
        self.opened = 0

    def open(self):
        self.opened += 1
        self.start = self.now

    def is_full(self):
        return self.now - self.start >= 1.0

    def close(self):
        return self.shares.pop(0)


class FakeMeasurement:
    """A measurement that takes `seconds` and stores the arguments of `finish`."""

    def __init__(self, meter, seconds):
        self.meter, self.seconds = meter, seconds
        self.measured = 0
        self.finished = None

    def measure(self):
        self.meter.now += self.seconds
        self.measured += 1

    def finish(self, other_cpu, noisy):
        self.finished = (other_cpu, noisy)


def make_windows(meter, **options):
    return MeasurementWindows(meter, **{"allow_noise": False, **options})


def test_measurements_share_a_window_until_it_is_one_second_long():
    meter = SimulatedMeter([0.01, 0.02])
    measurements = [FakeMeasurement(meter, 0.4) for _ in range(4)]
    loop = make_windows(meter)
    for measurement in measurements:
        loop.run(measurement)
    assert [measurement.finished for measurement in measurements] == [(0.01, False)] * 3 + [None]
    loop.close()
    assert measurements[3].finished == (0.02, False)


def test_a_noisy_window_is_repeated_until_it_is_quiet():
    meter = SimulatedMeter([0.3, 0.04])
    measurements = [FakeMeasurement(meter, 0.6) for _ in range(2)]
    loop = make_windows(meter)
    for measurement in measurements:
        loop.run(measurement)
    assert [measurement.measured for measurement in measurements] == [2, 2]
    assert [measurement.finished for measurement in measurements] == [(0.04, False)] * 2


def test_a_window_that_is_noisy_three_times_is_marked_noisy():
    meter = SimulatedMeter([0.3, 0.2, 0.1])
    measurement = FakeMeasurement(meter, 2.0)
    make_windows(meter).run(measurement)
    assert measurement.measured == 3
    assert measurement.finished == (0.1, True)


def test_allowed_noise_is_recorded_without_a_repeat():
    meter = SimulatedMeter([0.5])
    measurement = FakeMeasurement(meter, 2.0)
    make_windows(meter, allow_noise=True).run(measurement)
    assert measurement.measured == 1
    assert measurement.finished == (0.5, False)


def test_unknown_noise_does_not_mark_a_measurement():
    meter = SimulatedMeter([None])
    measurement = FakeMeasurement(meter, 2.0)
    make_windows(meter).run(measurement)
    assert measurement.finished == (None, False)


def test_closing_without_measurements_does_nothing():
    meter = SimulatedMeter([])
    make_windows(meter).close()
    assert meter.opened == 0


def test_the_outcome_of_a_window_is_reported_after_it_is_closed():
    meter, messages = SimulatedMeter([0.62, 0.3, 0.01, 0.5, 0.5, 0.5, None]), []
    loop = make_windows(
        meter, on_window=lambda share, text: messages.append((meter.opened, share, text))
    )
    for _ in range(3):
        loop.run(FakeMeasurement(meter, 1.0))
    assert messages == [
        (1, 0.62, "62% other CPU, repeat 2 of 3"),
        (2, 0.3, "30% other CPU, repeat 3 of 3"),
        (3, 0.01, "quiet"),
        (4, 0.5, "50% other CPU, repeat 2 of 3"),
        (5, 0.5, "50% other CPU, repeat 3 of 3"),
        (6, 0.5, "50% other CPU, times noisy"),
        (7, None, "other CPU unknown"),
    ]


def test_kept_times_of_a_noisy_window_are_reported_if_noise_is_allowed():
    messages = []
    loop = make_windows(
        SimulatedMeter([0.5]), allow_noise=True, on_window=lambda *call: messages.append(call)
    )
    loop.run(FakeMeasurement(loop._meter, 1.0))
    assert messages == [(0.5, "50% other CPU, times kept")]
