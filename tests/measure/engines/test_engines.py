"""Rows of other engines in a run: judged like all others, over their own vanilla, failing alone."""

import pytest
import torch
from transformers import LlamaForCausalLM

from specbench_cli.errors import ExitCode, UsageError
from specbench_cli.models import resolve
from specbench_cli.report.terminal import table
from specbench_cli.store.invariants import validate
from specbench_cli.summary import text
from specbench_cli.summary.summary import summarise

pytestmark = pytest.mark.usefixtures("small_pair")


@pytest.fixture
def answer():
    """What plain decoding of the target gives, by transformers' own module."""
    module = LlamaForCausalLM.from_pretrained(resolve("embedded").path, dtype=torch.float32)

    def decode(ids, budget):
        prompt = torch.tensor([ids])
        out = module.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=budget, do_sample=False
        )
        return out[0, len(ids) :].tolist()

    return decode


def row(double, name="engine:http", label=None):
    return {"name": name, "label": label or name, "params": {"url": double.url, "timeout": 5}}


def test_an_engines_rows_are_checked_by_ids_and_compared_with_its_own_vanilla(
    specbench, server, answer
):
    eos = LlamaForCausalLM.config_class.from_pretrained(resolve("embedded").path).eos_token_id
    plain, fast = (server("vllm", answer, eos=eos, speculates=each) for each in (False, True))
    outcome = specbench("sps", row(plain, "engine:http-vanilla"), row(fast))
    assert outcome.exit_code == ExitCode.OK
    for record in outcome.records:
        validate(record)
    own = outcome.by_label("engine:http")
    assert {record.verdict.kind for record in own} == {"identical"}
    assert all(r.steps is None and r.extra["drafted"] and r.ns.prefill for r in own)
    bases = {each["label"]: each["baseline"] for each in outcome.manifest["rows"]}
    assert bases["sps"] == "vanilla" and bases["engine:http"] == "engine:http-vanilla"
    summary = summarise(outcome.records, outcome.manifest, resamples=20)
    rows = {each.label: each for each in summary.rows}
    fast_row, plain_row = rows["engine:http"], rows["engine:http-vanilla"]
    assert {each.label for each in summary.rows[-2:]} == {"engine:http", "engine:http-vanilla"}
    ratio = fast_row.tokens_per_s / plain_row.tokens_per_s
    assert fast_row.speedup == pytest.approx(ratio)
    assert plain_row.speedup == 1
    assert fast_row.mat > 2 and plain_row.mat is None
    ((place, kind),) = text.sections(summary.rows)
    assert summary.rows[place].engine and "compare engines by tok/s" in kind
    lines = table.run_text(summary, table.Facts.from_manifest(outcome.manifest)).splitlines()
    assert kind in lines


def test_without_its_vanilla_an_engine_has_tokens_a_second_and_no_speedup(
    specbench, server, answer
):
    outcome = specbench(row(server("llama.cpp", answer)), limit=1)
    summary = summarise(outcome.records, outcome.manifest, resamples=20)
    (own,) = (each for each in summary.rows if each.engine)
    assert own.speedup is None and own.tokens_per_s
    assert own.speedup_note.endswith("add --method engine:http-vanilla")


def test_a_server_that_dies_fails_its_row_alone_and_the_rest_goes_on(specbench, server, answer):
    double, told = server("llama.cpp", answer), []

    def dying(events):
        told.append(None)
        yield from events if len(told) < 3 else ["no answer"]

    double.streams = dying
    outcome = specbench("sps", row(double), limit=6)
    own = outcome.by_label("engine:http")
    assert [r.error is None for r in own] == [True] + [False] * (len(own) - 1)
    assert "sent an invalid reply: no answer" in own[-1].error
    assert own[-1].error.endswith("or use another: --set engine:http.url=URL")
    assert "engine:http" in outcome.manifest["dropped"]
    assert len(outcome.by_label("sps")) == len(outcome.prompts)
    assert outcome.exit_code == ExitCode.OK


def test_a_run_of_a_dead_server_alone_ends_and_is_a_fault_of_the_environment(
    specbench, server, answer
):
    double = server("llama.cpp", answer)
    double.__exit__()
    outcome = specbench(row(double), limit=6)
    (own,) = outcome.by_label("engine:http")
    assert "cannot be reached" in own.error and len(outcome.prompts) == 1
    assert outcome.manifest["dropped"].keys() == {"engine:http"}
    assert outcome.exit_code == ExitCode.ENVIRONMENT


def test_a_server_that_dies_in_a_run_of_its_own_ends_it(specbench, server, answer):
    double, told = server("llama.cpp", answer), []

    def dying(events):
        told.append(None)
        yield from events if len(told) < 3 else ["no answer"]

    double.streams = dying
    outcome = specbench(row(double), limit=6)
    assert [r.error is None for r in outcome.by_label("engine:http")] == [True, *[False] * 3]
    assert outcome.exit_code == ExitCode.ENVIRONMENT


def test_a_row_without_a_server_is_refused_before_anything_is_loaded(specbench):
    with pytest.raises(UsageError, match="needs the address of a server") as caught:
        specbench("engine:http")
    assert caught.value.hint == "--set engine:http.url=http://127.0.0.1:8000"
