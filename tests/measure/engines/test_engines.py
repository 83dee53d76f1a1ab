"""Tests of methods that decode with another engine through an HTTP server."""

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
    """Return a function that decodes greedily with the transformers model of the target."""
    module = LlamaForCausalLM.from_pretrained(resolve("embedded").path, dtype=torch.float32)

    def decode(ids, budget):
        prompt = torch.tensor([ids])
        out = module.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=budget, do_sample=False
        )
        return out[0, len(ids) :].tolist()

    return decode


def row(fake_server, name="engine:http", label=None):
    return {"name": name, "label": label or name, "params": {"url": fake_server.url, "timeout": 5}}


def test_methods_of_an_engine_are_checked_by_ids_and_compared_with_its_vanilla(
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
    baselines = {each["label"]: each["baseline"] for each in outcome.manifest["rows"]}
    assert baselines["sps"] == "vanilla" and baselines["engine:http"] == "engine:http-vanilla"
    summary = summarise(outcome.records, outcome.manifest, resamples=20)
    rows = {each.label: each for each in summary.rows}
    fast_row, plain_row = rows["engine:http"], rows["engine:http-vanilla"]
    assert {each.label for each in summary.rows[-2:]} == {"engine:http", "engine:http-vanilla"}
    ratio = fast_row.tokens_per_s / plain_row.tokens_per_s
    assert fast_row.speedup == pytest.approx(ratio)
    assert plain_row.speedup == 1
    assert fast_row.mat > 2 and plain_row.mat is None
    ((place, kind),) = text.sections(summary.rows)
    assert summary.rows[place].engine and "to compare engines, use tok/s" in kind
    lines = table.run_text(summary, table.Facts.from_manifest(outcome.manifest)).splitlines()
    assert kind in lines


def test_an_engine_without_its_vanilla_has_no_speedup(specbench, server, answer):
    outcome = specbench(row(server("llama.cpp", answer)), limit=1)
    summary = summarise(outcome.records, outcome.manifest, resamples=20)
    (own,) = (each for each in summary.rows if each.engine)
    assert own.speedup is None and own.tokens_per_s
    assert own.speedup_note.endswith("add --method engine:http-vanilla")


def test_a_server_that_dies_fails_only_its_method(specbench, server, answer):
    fake_server, requests = server("llama.cpp", answer), []

    def fail_from_third(events):
        requests.append(None)
        yield from events if len(requests) < 3 else ["no answer"]

    fake_server.streams = fail_from_third
    outcome = specbench("sps", row(fake_server), limit=6)
    own = outcome.by_label("engine:http")
    assert [r.error is None for r in own] == [True] + [False] * (len(own) - 1)
    assert "sent an invalid reply: no answer" in own[-1].error
    assert own[-1].error.endswith("or use another: --set engine:http.url=URL")
    assert "engine:http" in outcome.manifest["dropped"]
    assert len(outcome.by_label("sps")) == len(outcome.prompts)
    assert outcome.exit_code == ExitCode.OK


def test_a_run_with_only_a_dead_server_is_an_environment_error(specbench, server, answer):
    fake_server = server("llama.cpp", answer)
    fake_server.__exit__()
    outcome = specbench(row(fake_server), limit=6)
    (own,) = outcome.by_label("engine:http")
    assert "cannot be reached" in own.error and len(outcome.prompts) == 1
    assert outcome.manifest["dropped"].keys() == {"engine:http"}
    assert outcome.exit_code == ExitCode.ENVIRONMENT


def test_a_run_with_only_one_server_ends_when_it_dies(specbench, server, answer):
    fake_server, requests = server("llama.cpp", answer), []

    def fail_from_third(events):
        requests.append(None)
        yield from events if len(requests) < 3 else ["no answer"]

    fake_server.streams = fail_from_third
    outcome = specbench(row(fake_server), limit=6)
    assert [r.error is None for r in outcome.by_label("engine:http")] == [True, *[False] * 3]
    assert outcome.exit_code == ExitCode.ENVIRONMENT


def test_a_method_without_a_server_address_is_rejected(specbench):
    with pytest.raises(UsageError, match="needs the address of a server") as caught:
        specbench("engine:http")
    assert caught.value.hint == "--set engine:http.url=http://127.0.0.1:8000"
