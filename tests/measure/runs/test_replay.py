"""Tests of `--verify replay`: every method emits vanilla's tokens, at any temperature."""

import pytest

from specbench_cli import registry
from specbench_cli.errors import ExitCode, UsageError

pytestmark = pytest.mark.usefixtures("small_pair")

LEAVES = """
from specbench_cli.api import Method, Outcome, Step

class Leaves(Method):
    '''Decides for itself.'''
    name = "leaves"

    def generate(self, session):
        session.prefill()
        while session.finish is None:
            draft = session.chain(())
            session.score(draft)
            yield Step(0, draft, session.commit(Outcome((), (7,), ("plain",), 0)))
"""


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_methods_emit_vanillas_tokens(specbench, temperature):
    outcome = specbench("sps", "pld", temperature=temperature, verify="replay", limit=2)
    vanilla = {(r.prompt_id, r.turn): r.output_ids for r in outcome.by_label("vanilla")}
    assert outcome.exit_code == ExitCode.OK
    for record in outcome.records:
        assert record.output_ids == vanilla[record.prompt_id, record.turn]
        assert record.sampling == "replay"
        assert record.verdict.kind == ("reference" if record.label == "vanilla" else "unchecked")
        assert record.log_likelihood is None
    assert outcome.manifest["near_ties"] is None
    assert outcome.manifest["config"]["effective"]["verify"] == "replay"
    assert any(sum(record.steps.accepted) for record in outcome.by_label("sps"))


def test_a_greedy_replay_has_the_steps_of_a_greedy_run(specbench):
    replayed = specbench("sps", verify="replay", limit=2)
    plain = specbench("sps", limit=2)
    for one, other in zip(
        *(sorted(run.records, key=lambda r: r.key) for run in (replayed, plain)), strict=True
    ):
        assert one.output_ids == other.output_ids
        assert one.steps == other.steps


def test_replayed_tokens_are_those_that_vanilla_samples(specbench):
    settings = {"temperature": 0.8, "limit": 2, "seed": 4}
    replayed = specbench(verify="replay", **settings)
    plain = specbench(verify="rejection", **settings)
    assert [r.output_ids for r in replayed.records] == [r.output_ids for r in plain.records]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_target_with_non_finite_logits_is_rejected(specbench, monkeypatch, temperature):
    generate = registry.load("vanilla").generate

    def broken(self, session):
        yield from generate(self, session)
        raise ArithmeticError(f"{session.requests[0].prompt_id}: the logits are not finite")

    monkeypatch.setattr(registry.load("vanilla"), "generate", broken)
    with pytest.raises(
        UsageError, match=r"generates no output that other methods can replay: mini/.*finite"
    ):
        specbench("pld", verify="replay", temperature=temperature, limit=1)


def test_a_method_that_emits_other_tokens_than_the_recording_fails(specbench, tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text(LEAVES)
    outcome = specbench("leaves", verify="replay", plugins=[str(file)], limit=1)
    assert {r.error for r in outcome.by_label("leaves")} == {
        "did not generate the recorded tokens: the method does not use `session.verify`"
    }
    assert outcome.exit_code == ExitCode.BAD_ANSWER
