"""Quiet windows, with a clock and a noise meter made of numbers."""

from specbench_cli.measure.quiet import MeasurementWindows


class World:
    """A clock that cells advance, and the shares that the noise meter will report in turn."""

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


class Cell:
    """Takes `seconds` a measurement and remembers what it was told."""

    def __init__(self, world, seconds):
        self.world, self.seconds = world, seconds
        self.measured = 0
        self.finished = None

    def measure(self):
        self.world.now += self.seconds
        self.measured += 1

    def finish(self, other_cpu, noisy):
        self.finished = (other_cpu, noisy)


def windows(world, **options):
    return MeasurementWindows(world, **{"allow_noise": False, **options})


def test_cells_are_joined_until_they_fill_a_second():
    world = World([0.01, 0.02])
    cells = [Cell(world, 0.4) for _ in range(4)]
    loop = windows(world)
    for cell in cells:
        loop.run(cell)
    assert [cell.finished for cell in cells] == [(0.01, False)] * 3 + [None]
    loop.close()
    assert cells[3].finished == (0.02, False)


def test_a_noisy_window_is_measured_again_and_kept_once_quiet():
    world = World([0.3, 0.04])
    cells = [Cell(world, 0.6) for _ in range(2)]
    loop = windows(world)
    for cell in cells:
        loop.run(cell)
    assert [cell.measured for cell in cells] == [2, 2]
    assert [cell.finished for cell in cells] == [(0.04, False)] * 2


def test_a_window_noisy_three_times_is_void():
    world = World([0.3, 0.2, 0.1])
    cell = Cell(world, 2.0)
    windows(world).run(cell)
    assert cell.measured == 3
    assert cell.finished == (0.1, True)


def test_allowed_noise_is_recorded_and_nothing_repeated():
    world = World([0.5])
    cell = Cell(world, 2.0)
    windows(world, allow_noise=True).run(cell)
    assert cell.measured == 1
    assert cell.finished == (0.5, False)


def test_a_platform_that_cannot_tell_voids_nothing():
    world = World([None])
    cell = Cell(world, 2.0)
    windows(world).run(cell)
    assert cell.finished == (None, False)


def test_settling_without_cells_does_nothing():
    world = World([])
    windows(world).close()
    assert world.opened == 0


def test_what_a_noisy_window_comes_to_is_said_while_none_is_open():
    world, said = World([0.62, 0.3, 0.01, 0.5, 0.5, 0.5, None]), []
    loop = windows(world, on_window=lambda share, text: said.append((world.opened, share, text)))
    for _ in range(3):
        loop.run(Cell(world, 1.0))
    assert said == [
        (1, 0.62, "62% other CPU, repeat 2 of 3"),
        (2, 0.3, "30% other CPU, repeat 3 of 3"),
        (3, 0.01, "quiet"),
        (4, 0.5, "50% other CPU, repeat 2 of 3"),
        (5, 0.5, "50% other CPU, repeat 3 of 3"),
        (6, 0.5, "50% other CPU, times void"),
        (7, None, "other CPU unknown"),
    ]


def test_times_of_a_noisy_window_are_said_to_be_kept_where_that_is_allowed():
    said = []
    loop = windows(World([0.5]), allow_noise=True, on_window=lambda *call: said.append(call))
    loop.run(Cell(loop._meter, 1.0))
    assert said == [(0.5, "50% other CPU, times kept")]
