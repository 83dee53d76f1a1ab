"""Untrusted tokenizers, chat templates and generation settings.

Any file leads to one clear error or to a prompt with valid ids, in limited time and memory.
"""

import json
import resource
import shutil
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.models.checkpoint import read_checkpoint_facts, read_tokenizer
from specbench_cli.errors import EnvironmentFault, PromptError
from specbench_cli.measure.bench import load_tokenizer
from specbench_cli.models.resolve import Checkpoint, resolve
from specbench_cli.report import tokens as viewer
from specbench_cli.tasks import render_prompt, template

BASE = resolve("embedded-1m").path
TOKENIZER = json.loads((BASE / "tokenizer.json").read_text(encoding="utf-8"))
SETTINGS = json.loads((BASE / "tokenizer_config.json").read_text(encoding="utf-8"))
ADDED = TOKENIZER["added_tokens"][0]
CHAT = [("user", "Say a word.")]


def write_file(name, content):
    """Return a function that writes a file into a model folder."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / name).write_bytes(data)


def tokenizer(**changed):
    return write_file("tokenizer.json", {**TOKENIZER, **changed})


def vocabulary(**changed):
    return tokenizer(model={**TOKENIZER["model"], **changed})


def settings(**changed):
    return write_file("tokenizer_config.json", {**SETTINGS, **changed})


def chat(text):
    return settings(chat_template=text)


def with_added_token(**changed):
    return tokenizer(added_tokens=[*TOKENIZER["added_tokens"], {**ADDED, **changed}])


DEEP = b'{"a":' * 100_000

DAMAGED = {
    "tokenizer.json is a list": write_file("tokenizer.json", []),
    "tokenizer.json is null": write_file("tokenizer.json", None),
    "tokenizer.json is a number": write_file("tokenizer.json", 3),
    "tokenizer.json is empty": write_file("tokenizer.json", b""),
    "tokenizer.json has no keys": write_file("tokenizer.json", {}),
    "tokenizer.json is binary": write_file("tokenizer.json", b"\xff\xfe\x00"),
    "tokenizer.json is deep": write_file("tokenizer.json", b"[" * 100_000),
    "no model": tokenizer(model=None),
    "unknown model": tokenizer(model={"type": "Weird"}),
    "vocabulary is a list": vocabulary(vocab=[]),
    "negative id": vocabulary(vocab={"a": -1}, merges=[]),
    "id is a text": vocabulary(vocab={"a": "0"}),
    "id beyond 32 bits": vocabulary(vocab={**TOKENIZER["model"]["vocab"], "zz9": 2**40}),
    "merge of unknown tokens": vocabulary(merges=["zz qq"]),
    "merge is a number": vocabulary(merges=[3]),
    "added id is a text": with_added_token(id="7"),
    "added tokens are an object": tokenizer(added_tokens={}),
    "unbalanced regular expression": tokenizer(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "("},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "unknown decoder": tokenizer(decoder={"type": "X"}),
    "stride longer than its text": tokenizer(
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 9}
    ),
    "settings are a list": write_file("tokenizer_config.json", []),
    "settings are null": write_file("tokenizer_config.json", None),
    "settings are empty": write_file("tokenizer_config.json", b""),
    "settings are binary": write_file("tokenizer_config.json", b"\xff\xfe"),
    "settings are deep": write_file("tokenizer_config.json", DEEP),
    "class is a number": settings(tokenizer_class=3),
    "class is a list": settings(tokenizer_class=["a"]),
    "auto_map is a text": settings(auto_map="x"),
    "bos is a number": settings(bos_token=5),
    "bos is a list": settings(bos_token=["a"]),
    "bos is an object without content": settings(bos_token={"content": 3}),
    "eos is a number": settings(eos_token=7),
    "eos is an object": settings(eos_token={"x": 1}),
    "pad is a list": settings(pad_token=[1]),
    "added tokens of the settings are a list": settings(added_tokens_decoder=[1]),
    "added tokens of the settings have no number": settings(added_tokens_decoder={"x": {}}),
    "added tokens of the settings are texts": settings(added_tokens_decoder={"5000": "Say"}),
    "special tokens are a text": write_file("special_tokens_map.json", "x"),
    "special tokens are lists": write_file("special_tokens_map.json", {"bos_token": [1]}),
    "added_tokens.json is a list": write_file("added_tokens.json", [1]),
    "added_tokens.json has texts": write_file("added_tokens.json", {"Say": "x"}),
    "extra tokens are numbers": settings(extra_special_tokens=[1, 2]),
    "unknown side": settings(padding_side="up"),
    "flag is a text": settings(split_special_tokens="x"),
    "input names are a number": settings(model_input_names=3),
    "key is a method's name": settings(decode="x"),
    "chat templates are numbers": chat([1]),
    "chat template without a text": chat([{"name": "default"}]),
    "chat template in another encoding": write_file("chat_template.jinja", b"\xff\xfe{{ 1 }}"),
}


@pytest.fixture
def folder(tmp_path):
    """Return a copy of the shipped draft model that a test may damage."""
    return shutil.copytree(BASE, tmp_path / "hostile")


@pytest.fixture
def load_damaged(folder):
    """Return a function that damages the copy and loads its tokenizer."""

    def load(damage):
        damage(folder)
        return load_tokenizer(Checkpoint(str(folder), "hostile", folder))

    return load


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_tokenizer_that_does_not_load_is_one_error(load_damaged, folder, damage, monkeypatch):
    with pytest.raises(EnvironmentFault, match=r"^the tokenizer of hostile does not load: .") as f:
        load_damaged(damage)
    assert len(f.value.message) < 400
    assert f.value.hint
    monkeypatch.setattr(viewer, "_folder", lambda target: folder)
    assert viewer.load_tokenizer("hostile") is None  # a report continues without texts


def test_panic_of_a_tokenizer_library_is_an_error_but_an_interrupt_is_not(folder, monkeypatch):
    import transformers

    class PanicException(BaseException):
        pass

    def raises(fault):
        def load(*_, **__):
            raise fault

        return load

    monkeypatch.setattr(
        transformers.PreTrainedTokenizerFast, "from_pretrained", raises(PanicException("at 7"))
    )
    with pytest.raises(EnvironmentFault, match="does not load: at 7"):
        read_tokenizer(folder)
    monkeypatch.setattr(
        transformers.PreTrainedTokenizerFast, "from_pretrained", raises(KeyboardInterrupt())
    )
    with pytest.raises(KeyboardInterrupt):
        read_tokenizer(folder)


def test_report_shows_ids_for_tokens_without_text():
    class Sentences:
        def decode(self, ids, **_):
            raise IndexError("piece id is out of range")

    assert viewer.decode_ids(Sentences(), [7, 4099]) == "<7> <4099>"


REFUSED = {
    "must be a text, got 3": chat(3),
    "must be a text, got True": chat(True),
    "must be a text, got {'default': 3}": chat([{"name": "default", "template": 3}]),
    "multiple chat templates with no default": chat(
        [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "y"}]
    ),
    "unexpected 'end of template'": chat("{% for"),
    "'nosuch' is undefined": chat("{{ nosuch.attr }}"),
    "can only concatenate str": chat("{{ messages[0]['content'] + 1 }}"),
    "division by zero": chat("{{ 1 / 0 }}"),
    "list object has no element 7": chat("{{ messages[7]['content'] }}"),
    "No filter named 'nosuch'": chat("{{ 'x' | nosuch }}"),
    "is unsafe": chat("{{ ''.__class__.__mro__ }}"),
    "'list' object is unsafe": chat("{{ messages.append(1) }}"),
    "no loader for this environment": chat("{% include 'x' %}"),
    "recursion": chat("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"),
    "recursion depth": chat("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}"),
    "too many levels of indentation": chat("{% if 1 %}" * 150 + "x" + "{% endif %}" * 150),
    "nested blocks": chat("{% for i in messages %}" * 30 + "x" + "{% endfor %}" * 30),
    "a system message is needed": chat("{{ raise_exception('a system message is needed') }}"),
    "conversation: 3": chat("{{ raise_exception(3) }}"),
    "argument 1 must be str": chat("{{ strftime_now(3) }}"),
    "Range too big": chat("{{ range(10 ** 9) }}"),
    "cannot encode the prompt: TextEncodeInput": chat("{{ '\\ud800' }}"),
    "cannot encode the prompt: WordPiece": settings(tokenizer_class="BertTokenizer"),
}


@pytest.mark.parametrize("damage", REFUSED.values(), ids=REFUSED)
def test_error_of_a_template_is_quoted(load_damaged, damage, request):
    made = load_damaged(damage)
    with pytest.raises(PromptError) as fault:
        render_prompt(made, CHAT, raw=False, label="hostile")
    assert request.node.callspec.id in fault.value.message
    assert " of hostile " in fault.value.message
    assert fault.value.hint


def test_long_error_of_a_template_is_truncated(load_damaged):
    with pytest.raises(PromptError, match=r"x\.\.\.$") as fault:
        render_prompt(load_damaged(chat("{{ raise_exception('x' * 3000000) }}")), CHAT, raw=False)
    assert len(fault.value.message) < 400


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='xxxx') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
SQUARED = "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}"
UNBOUNDED = {
    "loops": chat(LOOPS.replace("BODY", "")),
    "loops that write": chat(LOOPS.replace("BODY", "x" * 20)),
    "loops of filters": chat(LOOPS.replace("BODY", "{{ a | string | trim }}")),
    "constant power": chat("{{ (9 ** (9 ** 9)) % 7 }}"),
    "power": chat("{% set n = 9 %}{{ (n ** (n ** n)) % 7 }}"),
    "squares": chat(SQUARED + "{% endfor %}{{ n.x % 7 }}"),
    "lorem ipsum": chat("{{ lipsum(n=1000000) }}"),
    "repeated text": chat("{{ 'x' * 10000000000 }}"),
    "centred text": chat("{{ 'x' | center(10000000000) }}"),
    "padded text": chat("{{ 'x'.ljust(10000000000) }}"),
    "formatted text": chat("{{ '%10000000000d' % 1 }}"),
    "replaced text": chat("{{ ('x' * 100000).replace('x', 'y' * 1000000) }}"),
    "doubled text": chat(DOUBLED + "{% endfor %}{{ n.x }}"),
    "repeated list": chat("{{ ([0] * 3000000000) | length }}"),
    "60 MB": chat("{{ 'x ' * 30000000 }}"),
}


@pytest.mark.parametrize("damage", UNBOUNDED.values(), ids=UNBOUNDED)
def test_template_that_exceeds_a_limit_is_stopped(load_damaged, damage, monkeypatch):
    monkeypatch.setattr(template, "TEMPLATE_S", 0.2)
    monkeypatch.setattr(template, "TEMPLATE_BYTES", 1 << 28)
    made = load_damaged(damage)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(PromptError, match=r"takes more than 0\.2 s|needs more than 256 MiB|makes "):
        render_prompt(made, CHAT, raw=False)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert render_prompt(made, CHAT, raw=True)  # the limits apply to each template separately


FINE = {
    "class that nobody knows": settings(tokenizer_class="NoSuchTokenizer"),
    "class of another family": settings(tokenizer_class="LlamaTokenizer"),
    "no class": settings(tokenizer_class=None),
    "auto_map": settings(auto_map={"AutoTokenizer": ["x.Y", None]}),
    "no eos": settings(eos_token=None),
    "wrong length": settings(model_max_length="many"),
    "negative length": settings(model_max_length=-1),
    "truncated to a token": tokenizer(
        truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    ),
    "padded": tokenizer(
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 9999999,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        }
    ),
    "empty template": chat(""),
    "chat template is a folder": lambda folder: (folder / "chat_template.jinja").mkdir(),
}


@pytest.mark.parametrize("damage", FINE.values(), ids=FINE)
def test_readable_tokenizer_gives_ids_of_the_model(load_damaged, damage):
    ids = render_prompt(load_damaged(damage), CHAT, raw=False)
    assert len(ids) > 1
    assert max(ids) < 4096


def test_huge_token_id_is_rejected_without_allocating_memory(load_damaged):
    made = load_damaged(vocabulary(vocab={**TOKENIZER["model"]["vocab"], "zz9": 2**32 - 1}))
    with pytest.raises(ValueError, match="it has the token id 4294967295"):
        Vocabulary.from_tokenizer(made)


GENERATION = {
    "'x' is no token": {"eos_token_id": "x"},
    "'y' is no token": {"eos_token_id": [1, "y"]},
    "-1 is no token": {"eos_token_id": -1},
    "1000000000000 is no token": {"eos_token_id": [1, 10**12]},
    "1.0 is no token": {"eos_token_id": 1.0},
    "[1] is no token": {"eos_token_id": [[1]]},
    "{'a': 1} is no token": {"eos_token_id": {"a": 1}},
    "True is no token": {"eos_token_id": True},
    "it is no JSON object": [1],
}


@pytest.mark.parametrize("facts", GENERATION.values(), ids=GENERATION)
def test_wrong_eos_token_is_rejected(folder, facts, request):
    write_file("generation_config.json", facts)(folder)
    with pytest.raises(EnvironmentFault) as fault:
        read_checkpoint_facts(folder)
    assert request.node.callspec.id in fault.value.message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pad_token_id": 10**9}, "pad_token_id 1000000000 is no token of 4096"),
        ({"pad_token_id": "x"}, "pad_token_id 'x' is no token of 4096"),
        ({"pad_token_id": True}, "pad_token_id True is no token of 4096"),
        ({"bos_token_id": "x"}, "bos_token_id 'x' is no token of 4096"),
    ],
)
def test_wrong_special_token_of_a_config_is_rejected(folder, changed, message):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_file("config.json", {**config, **changed})(folder)
    with pytest.raises(EnvironmentFault) as fault:
        read_checkpoint_facts(folder)
    assert fault.value.message == f"hostile/config.json: {message}"


def test_negative_padding_id_is_accepted(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_file("config.json", {**config, "pad_token_id": -1})(folder)
    assert read_checkpoint_facts(folder).vocab_size == 4096


def run(capsys, more=""):
    code = app._run(
        f"run --target ./hostile -m pld -t own.jsonl --max-new-tokens 3 --allow-noise --out here"
        f" {more}".split()
    )
    return (code, *capsys.readouterr())


def test_prompt_with_a_token_outside_the_vocabulary_is_rejected(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    with_added_token(id=4096, content="<|tool|>")(folder)
    Path("own.jsonl").write_text('{"prompt": "Say a word."}\n{"prompt": "Call <|tool|> now."}\n')
    code, _, err = run(capsys)
    assert code == 2
    assert (
        "error: prompt own/1 has the token 4096, and hostile has 4096 tokens, 0 to 4095: its"
        " tokenizer does not fit its weights"
    ) in err
    assert not Path("here").exists()


@pytest.mark.parametrize(
    "facts",
    [
        {"eos_token_id": 1, "pad_token_id": [1]},
        {"eos_token_id": 1, "max_length": "x"},
        {"eos_token_id": 1, "forced_bos_token_id": "x", "suppress_tokens": "x"},
        {"eos_token_id": 1, "cache_implementation": "nosuch"},
        {"eos_token_id": 1, "watermarking_config": 3},
    ],
    ids=lambda facts: list(facts)[1],
)
def test_unused_generation_settings_do_not_end_a_run(folder, capsys, monkeypatch, facts):
    monkeypatch.chdir(folder.parent)
    write_file("generation_config.json", facts)(folder)
    Path("own.jsonl").write_text('{"prompt": "Say a word."}\n')
    code, _, err = run(capsys, "--judge all")
    assert code == 0, err
