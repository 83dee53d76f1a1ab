"""Faults that only a device shows, planted one at a time. The tests must find each."""

import pytest
import torch

from specbench_cli.engine import host, scoring
from specbench_cli.engine.drafting import levels
from specbench_cli.engine.models.attention import Rotary
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Noise, Sampling

CPU = torch.device("cpu")
GREEDY, COUPLED = Sampling(), Sampling("coupled", 0.8, seed=3)
REJECTION = Sampling("rejection", 0.8, seed=3)
GROWN = {"shape": "dynamic", "width": 3, "depth": 3}
STAGED = {"lookahead": 3, "draw_mode": "without_replacement"}

LEFT = {
    "the ids of a draft": (host, "ids", "pld", {"length": 4, "ngram": 1}, GREEDY),
    "the places of what is picked": (host, "cached_ids", "eagle", {"depth": 2}, GREEDY),
    "the mask of a tree": (scoring, "build_tree_mask", "sps-tree", GROWN, GREEDY),
    "the mask of a level": (levels, "_mask", "sps-tree", GROWN, GREEDY),
    "the positions of a level": (levels, "_positions", "sps-tree", GROWN, GREEDY),
    "what a node sees": (torch, "eye", "eagle2", {"depth": 3}, GREEDY),
    "who is fed": (torch, "arange", "eagle2", {"depth": 3}, GREEDY),
    "who is prepared": (host, "ids", "ssd", {"length": 2}, GREEDY),
    "noise": (Noise, "__init__", "vanilla", {}, COUPLED),
    "what was drawn": (host, "ids", "staged", STAGED, REJECTION),
    "what is sent": (host, "send", "eagle", {"depth": 2}, GREEDY),
}
"""Tensors left on the CPU: the function that leaves them, and a method whose steps need them."""


@pytest.mark.parametrize(("owner", "name", "method", "params", "rule"), LEFT.values(), ids=LEFT)
def test_a_tensor_left_on_the_cpu_is_found(far, monkeypatch, owner, name, method, params, rule):
    real = getattr(owner, name)

    def keep_on_cpu(*args, **kwargs):
        kwargs.pop("device", None)
        return real(*(CPU if isinstance(arg, torch.device) else arg for arg in args), **kwargs)

    far.decode(method, params, rule, budget=6)
    monkeypatch.setattr(owner, name, keep_on_cpu)
    with pytest.raises(RuntimeError, match=r"on the same device|left on the CPU"):
        far.decode(method, params, rule, budget=6)


def test_a_table_of_positions_left_on_the_cpu_is_found(far, monkeypatch):
    def select(self, positions):
        return tuple(torch.ones(len(positions), *t.shape[1:], dtype=t.dtype) for t in self.tables)

    monkeypatch.setattr(Rotary, "select", select)
    with pytest.raises(RuntimeError, match="on the same device"):
        far.decode("sps-tree", GROWN)


READS = {
    "tolist": lambda rows: rows.tolist(),
    "item": lambda rows: rows[0, 0].item(),
    "int": lambda rows: int(rows[0].argmax()),
    "float": lambda rows: float(rows[0, 0]),
    "if": lambda rows: 1 if rows[0, 0] > 0 else 2,
    "all": lambda rows: bool(rows.isfinite().all()),
    "slice": lambda rows: rows[0, : rows[0].argmax()],
    "max": lambda rows: max(rows[0]),
    "equal": torch.equal,
    "allclose": torch.allclose,
    "nonzero": lambda rows: (rows > 0).nonzero(),
    "chosen by a mask": lambda rows: rows[rows > 0],
    "unique": lambda rows: rows.argmax(-1).unique(),
    "cpu": lambda rows: rows.cpu(),
    "to": lambda rows: rows.to("cpu"),
    "to double": lambda rows: rows.to("cpu", torch.float64),
    "copy": lambda rows: torch.empty(rows.shape).copy_(rows),
    "numpy": lambda rows: rows.numpy(),
    "a place on the CPU": lambda rows: rows[torch.tensor([0])],
    "places as a list": lambda rows: rows[[0]],
    "made there": lambda rows: torch.tensor([0], device=rows.device),
    "made like another": lambda rows: rows.new_tensor([0.5]),
    "send": lambda rows: torch.zeros(2).to(rows.device),
    "sent like another": lambda rows: torch.zeros(2).to(rows),
}
"""Implicit waits for the device: to read a value, or until a transfer is complete."""


def plant_read(monkeypatch, read):
    """Read the target's logits with `read` before each decision."""
    real = Session.verify

    def verify(self, draft, rows):
        read(rows, rows) if read in (torch.equal, torch.allclose) else read(rows)
        return real(self, draft, rows)

    monkeypatch.setattr(Session, "verify", verify)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_implicit_wait_is_found(far, monkeypatch, read):
    plant_read(monkeypatch, read)
    far.decode("vanilla", device=CPU, budget=3)
    with pytest.raises(RuntimeError):
        far.decode("vanilla", budget=3)


def test_an_additional_wait_is_counted_with_its_function(far, monkeypatch):
    plant_read(monkeypatch, lambda rows: host.number(rows[0, 0]))
    _, steps = far.decode("vanilla", budget=4)
    assert [told.waits for told in steps[1:]] == [("<lambda>", "decide_by_choice")] * 2


def test_reading_cpu_values_needs_no_wait(far):
    with far.on():
        assert host.numbers(torch.tensor([3, 4])) == [3, 4]
        assert float(torch.ones(2).sum()) == 2.0
    assert not far.mode.loading
