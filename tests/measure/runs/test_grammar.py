"""Tests of `--grammar`: all methods give the same outputs, which the grammar allows."""

from __future__ import annotations

import json

import llguidance
import llguidance.hf
import pytest
import torch

from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.errors import EnvironmentFault, ExitCode, UsageError
from specbench_cli.measure.bench import load_tokenizer
from specbench_cli.models import resolve
from specbench_cli.plan import grammar as source
from specbench_cli.plan.grammar import Grammar
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary import text

pytestmark = pytest.mark.usefixtures("small_pair")

PERSON = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": False},
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[A-Za-z ]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def person(tmp_path):
    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON))
    return str(file)


def texts(outcome, label="vanilla"):
    tokenizer = load_tokenizer(resolve("embedded-7m"))
    return {
        record.prompt_id: tokenizer.decode(record.output_ids, skip_special_tokens=True)
        for record in outcome.by_label(label)
    }


@pytest.mark.parametrize("rule", [{}, {"temperature": 0.8, "verify": "coupled"}])
def test_methods_give_the_ids_of_constrained_vanilla_and_valid_outputs(specbench, person, rule):
    tasks = {"tasks": ["json"], "limit": 3, "max_new_tokens": 48}
    outcome = specbench("sps", "pld", grammar=person, **tasks, **rule)
    assert outcome.exit_code == ExitCode.OK
    assert {r.verdict.kind for r in outcome.records} == {"reference", "identical"}
    assert all(r.finish == "eos" and r.valid for r in outcome.records)
    for output in texts(outcome).values():
        assert json.loads(output).keys() == PERSON["properties"].keys()


def test_outputs_cut_at_the_token_limit_are_reported_and_not_valid(specbench, person):
    outcome = specbench("pld", grammar=person, tasks=["json"], limit=2, max_new_tokens=5)
    assert {(r.finish, r.valid) for r in outcome.records} == {("length", None)}
    reading = read_report_data(RunDir.open(outcome.path))
    (line,) = text.grammar(reading.summary, reading.facts)
    counts = "0 of 2 outputs complete; 2 cut at the token limit"
    assert line == f"under grammar person.json: each method: {counts}"
    assert "under grammar person.json" in " ".join(reading.facts.header({"json": 2}, 100))


def test_vanilla_equals_masked_decoding_with_transformers(specbench, person):
    outcome = specbench(grammar=person, tasks=["json"], limit=2, max_new_tokens=48)
    checkpoint = resolve("embedded-7m")
    module = get_module(load_decoder(checkpoint.path, name="target"))
    tokenizer = load_tokenizer(checkpoint)
    grammar_tokenizer = llguidance.hf.from_tokenizer(tokenizer)
    prompt_ids = {prompt.prompt_id: prompt.ids for prompt in outcome.prompts}
    for record in outcome.by_label("vanilla"):
        matcher = llguidance.LLMatcher(
            grammar_tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(PERSON))
        )
        ids, found = torch.tensor([list(prompt_ids[record.prompt_id])]), []
        while len(found) < 48 and found[-1:] != [tokenizer.eos_token_id]:
            with torch.no_grad():
                row = module(input_ids=ids).logits[0, -1].clone()
            bias = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
            row[: len(bias)][bias == 0] = -torch.inf
            row[len(bias) :] = -torch.inf
            found.append(int(row.argmax()))
            matcher.consume_token(found[-1])
            ids = torch.cat((ids, torch.tensor([found[-1:]])), 1)
        assert found == record.output_ids


def test_a_batch_gives_the_same_constrained_outputs(specbench, person):
    alone = specbench(grammar=person, tasks=["json"], limit=3, max_new_tokens=24)
    batched = specbench("sps", grammar=person, tasks=["json"], limit=3, max_new_tokens=24, batch=3)
    expected = {r.prompt_id: r.output_ids for r in alone.records}
    assert all(r.output_ids == expected[r.prompt_id] for r in batched.records)


def test_sampled_outputs_are_checked_by_the_constrained_distribution(specbench, person):
    settings = {"grammar": person, "tasks": ["json"], "limit": 2, "max_new_tokens": 48}
    outcome = specbench("sps", temperature=1.0, **settings)
    assert outcome.exit_code == ExitCode.OK
    for record in outcome.records:
        assert record.valid
        assert record.likelihood is not None
        # A token without an alternative in the grammar has probability 1.
        assert record.log_probs[0] == 0.0


def test_the_manifest_has_the_grammar_and_a_changed_one_prevents_resuming(
    specbench, person, tmp_path
):
    log = specbench.log(interrupt_after=1)
    with pytest.raises(KeyboardInterrupt):
        specbench("pld", grammar=person, tasks=["json"], limit=2, log=log)
    path = specbench.path(1)
    manifest = json.loads((path / "manifest.json").read_text())
    grammar = manifest["grammar"]
    assert grammar["name"] == "person.json"
    assert grammar["library"].startswith("llguidance ")
    assert manifest["config"]["effective"]["grammar"] == f"person.json {grammar['sha256'][:12]}"
    (tmp_path / "person.json").write_text(json.dumps({**PERSON, "required": []}))
    with pytest.raises(UsageError, match="setting grammar"):
        specbench(resume=path)


@pytest.mark.parametrize(
    ("name", "holds", "not_"),
    [
        ("json", '{"a": [1, "b", null]}', '{"a": NaN}'),
        ("words.lark", "ab", "abab"),
        ("words.gbnf", "a1", "a"),
        ("digits.regex", "042", "4x"),
    ],
)
def test_grammars_of_each_kind_accept_and_reject_a_text(tmp_path, name, holds, not_):
    (tmp_path / "words.lark").write_text('start: "a" "b"\n')
    (tmp_path / "words.gbnf").write_text('root ::= "a" digit\ndigit ::= [0-9]\n')
    (tmp_path / "digits.regex").write_text("[0-9]{3}\n")
    grammar = Grammar.read(name if name == "json" else str(tmp_path / name))
    assert grammar.accepts(holds)
    assert not grammar.accepts(not_)
    assert not grammar.accepts(holds[:-1])


@pytest.mark.parametrize(
    ("file", "grammar", "message"),
    [
        (None, None, "the file does not exist, and built-in grammars are: json"),
        ("a.txt", "x", "its name must have one of the suffixes .json"),
        ("a.json", "{", "is not a JSON schema"),
        ("a.json", '{"type": "objekt"}', "is not a JSON schema"),
        ("a.lark", "start: (", "is not a Lark grammar"),
        ("a.gbnf", "nonsense", "is not a GBNF grammar"),
        ("a.regex", "(", "is not a regular expression"),
    ],
)
def test_an_invalid_grammar_is_an_error_of_one_line(tmp_path, file, grammar, message):
    path = tmp_path / (file or "gone.json")
    if file is not None:
        path.write_text(grammar)
    with pytest.raises(UsageError, match=message) as caught:
        Grammar.read(str(path))
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_missing_grammar_package_is_an_error_with_a_hint(monkeypatch):
    monkeypatch.setattr(source, "LIBRARY", "no_such_library")
    with pytest.raises(EnvironmentFault, match="needs the Python package") as caught:
        Grammar.read("json")
    assert "specbench-cli[grammar]" in caught.value.hint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("hf:vanilla", "hf:vanilla is a method of another program"),
        (
            {"name": "medusa", "label": "lossy", "params": {"accept": "typical"}},
            "lossy is lossy, and may accept tokens that --grammar json forbids",
        ),
    ],
)
def test_a_method_that_cannot_be_constrained_is_rejected(specbench, row, message):
    with pytest.raises(UsageError, match=message) as caught:
        specbench(row, grammar="json", tasks=["json"])
    assert "omit --grammar" in caught.value.hint
