"""Wrong input on the command line: one error, the right exit code, and no file changed."""

import errno
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from specbench_cli import app
from specbench_cli.measure import bench
from specbench_cli.measure.quiet import NoiseMeter
from specbench_cli.models import resolve
from specbench_cli.store import jsonl
from specbench_cli.store.run_dir import RunDir

ROOT = Path(__file__).parents[2]
SMALL = "-m pld --limit 2 --max-new-tokens 4 --threads 1 --device cpu --out here"

FILES = {
    "unclosed.yaml": "limit: 3\nmethods: [sps\n",
    "unknown.yaml": "limit: 3\nlimti: 4\n",
    "type.yaml": "limit: 3\ntemperature: hot\n",
    "list.yaml": "- limit\n- 3\n",
    "twice.yaml": "limit: 3\nlimit: 4\n",
    "params.yaml": "methods:\n- name: sps\n  params: {lenght: 3}\n",
    "cut.jsonl": '{"prompt": "x"}\n{"prompt": \n',
    "column.jsonl": '{"prompt": "x"}\n{"pormpt": "y"}\n',
    "empty.jsonl": "\n\n",
    "open.json": '{"type": ',
    "rows.jsonl": "[1]\n",
    "task.yaml": "name: mine\nversion: '1'\nsource: {file: gone.jsonl}\nrowz: 3\n",
    "own.jsonl": '{"prompt": "One and one is"}\n{"prompt": "Two and two is"}\n',
    "long.jsonl": json.dumps({"prompt": "word " * 5000}) + "\n",
    "foreign/notes.txt": "mine",
    "digits.yaml": "seed: " + "9" * 5000,
    "line.yaml": 'methods:\n- {name: pld, label: "a\\nb"}\n',
    "rows.yaml": "methods:\n" + "".join(f"- {{name: pld, label: p{n}}}\n" for n in range(129)),
    "folder/manifest.json": '{"status": "finished"}',
    "folder/records.jsonl/.keep": "",
    "nothing/.keep": "",
    "file": "x",
    "damaged/manifest.json": "{",
    "strange/manifest.json": '{"status": "running"}',
    "web/manifest.json": '{"name": "app", "icons": []}',
}


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Return a function that runs a command in a folder with the files above.

    The function returns exit code, stdout and stderr.
    """
    monkeypatch.setenv("SPECBENCH_DEBUG", "")
    monkeypatch.delenv("SPECBENCH_DATA", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    work = tmp_path / "work"
    for name, text in FILES.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    monkeypatch.chdir(work)

    def call(command):
        code = app._run(shlex.split(command))
        return (code, *capsys.readouterr())

    return call


def contents(folder="."):
    """Return the content of every file below a folder."""
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def read_error(err):
    """Return the error message and its hint, and check that only notes precede them."""
    lines = err.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("error: "))
    message, *hint = lines[start:]
    assert "Traceback" not in err
    assert len(hint) <= 1, err
    return message.removeprefix("error: "), hint[0].removeprefix("hint: ") if hint else ""


REFUSED = [
    # unknown names
    ("run -m spss", 2, "there is no method 'spss'; did you mean 'sps'?", "specbench list methods"),
    ("run -t gsm8", 2, "unknown task 'gsm8', did you mean 'gsm8k'?", "gsm8k"),
    ("run -t gone.jsonl", 2, "no such task file: gone.jsonl", "specbench list tasks"),
    ("run --target lama-7b", 2, "unknown model 'lama-7b'; did you mean 'llama-7b'?", "list models"),
    ("run --target llama-2-7b", 2, "did you mean 'llama-2-7b-chat'?", "specbench list models"),
    ('run --draft "a\nb"', 2, "--draft must have no line break and no control", "line breaks"),
    ("run --target ./gone", 2, "no such folder: ./gone", "specbench list models"),
    ("run --category sonnets", 2, "no question of category 'sonnets'; there are", ""),
    # weights
    ("run --target nothing", 2, "nothing: no config.json in this folder", "save_pretrained"),
    ("run --target llama-7b", 3, "(about 13.5 GB to download), and HF_HUB_OFFLINE", "hf download"),
    ("run --target org/name", 3, "org/name is not on this machine (download size not", "hf downl"),
    ("run --target llama-3.1-8b-instruct", 3, "(about 16.1 GB", "accept the licence at https://"),
    # drafts
    ("run --target embedded-1m -m sps", 2, "sps needs a draft model, and embedded-1m", "--draft M"),
    ("run --target embedded-1m -m sps --draft auto", 2, "has no default one", "--draft MODEL"),
    # several targets
    (
        "run --targets embedded-1m --target embedded-7m",
        2,
        "target and targets cannot be combined",
        "--help",
    ),
    ("run --targets embedded-1m,embedded-1m", 2, "has embedded-1m twice", "specbench run --help"),
    ("run -m pld --drafts embedded-1m", 2, "needs a method with a draft model", "--method sps"),
    # batches, load, memory
    ("run --batch 0", 2, "batch", "specbench run --help"),
    ("run --batch many", 2, "batch", "specbench run --help"),
    ("run --batch 4 --prefill-chunk 0", 2, "prefill", "specbench run --help"),
    ("run -m pearl --batch 4", 2, "pearl decodes one prompt at a time, and --batch 4", "omit --ba"),
    ("run --load poisson:0", 2, "RATE must be a number above 0", "specbench run --help"),
    ("run --load poisson:4:1:1", 2, "use 1:4:1 or 4:1:-1", "specbench run --help"),
    ("run --load often", 2, "must be poisson:RATE", "specbench run --help"),
    ("run --load trace:gone.txt", 2, "trace gone.txt cannot be read", "specbench run --help"),
    ("run --memory-budget lots", 2, "must be a size above 0 such as 2GB", "specbench run --help"),
    # grammars
    (
        "run --grammar jsn",
        2,
        "and built-in grammars are: json; did you mean 'json'?",
        "--grammar json",
    ),
    (
        "run --grammar foreign/notes.txt",
        2,
        "its name must have one of the suffixes",
        "mv foreign",
    ),
    (
        "run --grammar open.json",
        2,
        "--grammar open.json is not a JSON schema: ",
        "docs/how-to/grammars.md",
    ),
    (
        "run --grammar json -m hf:vanilla",
        2,
        "hf:vanilla is a method of another program",
        "omit --grammar",
    ),
    ("run --grammar ''", 2, "--grammar must", "specbench run --help"),
    # contrasts
    ("run --contrast lots", 2, "--contrast must be beta=0.5,keep=0.5", "specbench run --help"),
    ("run --contrast alpha=1", 2, "has unknown key 'alpha'", "specbench run --help"),
    ("run --contrast beta=nan", 2, "has beta=nan; must be a number from 0 to 10", "specbench run"),
    ("run --contrast beta=1,beta=2", 2, "has beta twice", "specbench run --help"),
    ("run --contrast beta=1 -m hf:vanilla", 2, "is a method of another program", "omit --contrast"),
    ("run --contrast beta=1 -m typical", 2, "typical, ", "omit --contrast"),
    (
        "run --contrast beta=1 --memory-budget 2GB",
        2,
        "does not include the KV states",
        "specbench run",
    ),
    # more machines
    ("run --executor slurm", 2, "'slurm' is not one of 'local', 'ray'", ""),
    ("run --executor ray --load poisson:2", 2, "omit load poisson:2", "specbench run --help"),
    ("run --executor ray --tune", 2, "omit tune", "specbench run --help"),
    ("run --executor ray --device cuda:1", 2, "omit device cuda:1", "specbench run --help"),
    ("run --executor ray -m suffix", 2, "suffix learns from earlier prompts", "--executor local"),
    # files
    ("run --config gone.yaml", 2, "cannot read gone.yaml: No such file", ""),
    ("run --config foreign", 2, "cannot read foreign: Is a directory", ""),
    ("run --config unclosed.yaml", 2, "unclosed.yaml:3: expected ',' or ']', but got", "limit: 24"),
    ("run --config unknown.yaml", 2, "unknown.yaml:2: limti is not known; did you mean", "--help"),
    ("run --config type.yaml", 2, "type.yaml:2: temperature must be a number, got 'hot'", "--help"),
    (
        "run --config list.yaml",
        2,
        "list.yaml must consist of `key: value` lines, got list",
        "limit: 24",
    ),
    ("run --config twice.yaml", 2, "twice.yaml:2: 'limit' is already on line 1", ""),
    ("run --config params.yaml", 2, "sps.lenght is not known; did you mean 'length'?", "list meth"),
    ("run -t cut.jsonl", 2, "cut.jsonl:2: not JSON", '"prompt"'),
    ("run -t column.jsonl", 2, "column.jsonl:2: no 'turns' or 'prompt' or 'question'", '"prompt"'),
    ("run -t rows.jsonl", 2, "rows.jsonl:1: expected a JSON object, got [1]", '"prompt"'),
    ("run -t empty.jsonl", 2, "empty.jsonl holds no question", '"prompt"'),
    ("run -t task.yaml", 2, "task.yaml:4: rowz is not known; did you mean 'rows'?", ""),
    ("run -t mini,mini", 2, "two tasks have the same name: mini, mini", "give each task once"),
    # numbers
    ("run --limit 0", 2, "--limit must be at least 1, got '0'", "specbench run --help"),
    ("run --limit -3", 2, "--limit must be at least 1, got '-3'", "specbench run --help"),
    ("run --limit 1.5", 2, "--limit must be a whole number, got '1.5'", "specbench run --help"),
    ("run --limit 1e400", 2, "--limit must be a finite number, got 1e400", "specbench run --help"),
    ("run --max-new-tokens 0", 2, "--max-new-tokens must be at least 1, got '0'", "--help"),
    ("run --max-new-tokens -1", 2, "--max-new-tokens must be at least 1, got '-1'", "--help"),
    ("run --repeats 0", 2, "--repeats must be at least 1, got '0'", "specbench run --help"),
    ("run --threads 0", 2, "--threads must be at least 1, got '0'", "specbench run --help"),
    ("run --threads 1000000000", 3, "--threads 1000000000: this machine has", "--th"),
    ("run --timeout-per-prompt 1e300", 2, "--timeout-per-prompt must be at most 1e+09", "--help"),
    ("run --seed -1", 2, "--seed must be at least 0, got '-1'", "specbench run --help"),
    ("run --temperature nan", 2, "--temperature must be a finite number, got nan", "--help"),
    ("run --temperature inf", 2, "--temperature must be a finite number, got inf", "--help"),
    ("run --temperature -0.5", 2, "--temperature must be at least 0, got '-0.5'", "--help"),
    ("run --temperature hot", 2, "--temperature must be a number, got 'hot'", "--help"),
    ("run --top-p 0 --temperature 1", 2, "--top-p must be at least 1e-09, got '0'", "--help"),
    ("run --top-p 1.1 --temperature 1", 2, "--top-p must be at most 1, got '1.1'", "--help"),
    ("run --top-p nan --temperature 1", 2, "--top-p must be a finite number, got nan", "--help"),
    ("run --top-k -1 --temperature 1", 2, "--top-k must be at least 0, got '-1'", "--help"),
    ("run --top-k 2.5 --temperature 1", 2, "--top-k must be a whole number, got '2.5'", "--help"),
    (f"run --seed {'9' * 100_000}", 2, "--seed must have at most 300 digits, got 100000", "--help"),
    (
        "run --config digits.yaml",
        2,
        "digits.yaml: it contains a number of more than 4300 digits",
        "",
    ),
    ("run --device cuda:99999", 2, "must be auto, cpu, cuda or cuda:N, got 'cuda:99999'", "--help"),
    (f"run --devices target=cpu:{'9' * 5000},draft=cpu", 2, "has an invalid range of cores: 9", ""),
    ("run -m sps --sweep sps.length=1e999999:1e999999:1", 2, "must be a range a:b:step", "1:6:1"),
    ("run -m sps --sweep sps.length=1:1e999999:1e999998", 2, "must be a range a:b:step", "1:6:1"),
    (f"run --load burst:{'9' * 5000}:1", 2, "SIZE must be a whole number above 0", "--help"),
    ("recommend --minutes 1e400", 2, "minutes up to 100,000, got '1e400'", "--help"),
    ("recommend --minutes nan", 2, "minutes up to 100,000, got 'nan'", "--help"),
    ("recommend --batches 99999999999", 2, "must be whole numbers below a million", "--help"),
    # devices, folders and pipes in place of files
    ("run --load trace:/dev/zero", 2, "/dev/zero cannot be read: it has more than 64 MB", ""),
    ("run --load trace:foreign", 2, "trace foreign cannot be read: Is a directory", "--help"),
    ("run --config /dev/zero", 2, "/dev/zero is not a regular file", ""),
    (
        "run --grammar /dev/zero",
        2,
        "--grammar /dev/zero: the file does not exist",
        "--grammar json",
    ),
    ("run --plugin /dev/zero", 2, "the plug-in file /dev/zero", "--plugin FILE.py"),
    ("run -t /dev/zero", 2, "/dev/zero is not a regular file", "docs/how-to/tasks.md"),
    ("compare /dev/zero foreign", 2, "/dev/zero is not a run, a folder of runs", "list runs"),
    ("predict strange --costs /dev/zero", 2, "/dev/zero: it has more than 64 MB", "--probe"),
    ("report folder", 2, "folder/records.jsonl is a folder, but must be a file", "another"),
    ("compare folder folder", 2, "folder/records.jsonl is a folder, but must be", "another"),
    # names of several lines, and too many methods
    ("run --config line.yaml", 2, "methods.label must have no line break and no control", "line"),
    ('run --draft "a\nb"', 2, "--draft must have no line break and no control", "line breaks"),
    (
        'run --dry-run --out "a\nb"',
        2,
        "--out must have no line break and no control",
        "line breaks",
    ),
    (
        'report strange --to md "--out=a\nb"',
        2,
        "--out must have no line break and no",
        "line breaks",
    ),
    ("run --config rows.yaml", 2, "methods must be a list of at most 128, got 130", "run --help"),
    # choices
    ("run --verify coupled", 2, "verify 'coupled' needs a temperature above 0", "--help"),
    ("run --verify greedy", 2, "'greedy' is not one of 'rejection', 'coupled'", "--help"),
    ("run --verify maybe --temperature 1", 2, "'maybe' is not one of 'rejection'", "--help"),
    ("run --device tpu", 2, "--device must be auto, cpu, cuda or cuda:N, got 'tpu'", "--help"),
    ("run --dtype int8", 2, "--dtype must be one of 'float32', 'bfloat16' or 'float16'", "--help"),
    # methods' parameters
    ("run --set sps=7", 2, "--set must be METHOD.PARAM=VALUE, got 'sps=7'", "--set sps.length=7"),
    ("run --set sps.length", 2, "--set must be METHOD.PARAM=VALUE, got 'sps.length'", "--set sps."),
    ("run --set spss.length=7", 2, "there is no method 'spss'; did you mean 'sps'?", "list method"),
    ("run --set sps.lenght=7", 2, "sps.lenght is not known; did you mean 'length'?", "methods sps"),
    (
        "run --set sps.length=many",
        2,
        "sps.length must be a whole number, or heuristic, confidence,",
        "methods sps",
    ),
    ("run --set sps.length=0", 2, "sps.length must be at least 1, got 0", "list methods sps"),
    (
        "run -m sps --set pld.ngram=3",
        2,
        "--set pld.ngram names a method that is not",
        "--method p",
    ),
    # output folders
    (
        "run --out foreign",
        2,
        "foreign is not empty, but contains no run",
        "choose a new or empty folder",
    ),
    ("run --out strange", 2, "strange already contains a run", "specbench run --resume strange"),
    ("run --out file", 2, "cannot write to file: File exists", "give another --out"),
    ("run --out file/below", 2, "cannot write to file/below: Not a directory", "another --out"),
    ("run --resume gone", 2, "gone contains no run (no readable manifest.json)", "list runs"),
    ("run --resume foreign", 2, "foreign contains no run (no readable manifest.json)", "list runs"),
    ("run --resume last", 2, "there is no run in results/runs", "specbench run"),
    (
        "run --resume damaged",
        2,
        "damaged/manifest.json is damaged: not JSON",
        "a new run",
    ),
    ("run --resume strange", 2, "strange cannot be resumed: its .resume.json is missing", "a new"),
    ("report damaged", 2, "damaged/manifest.json is damaged: not JSON", "a new run"),
    # folders without a run, or a run without records
    ("run --resume web", 2, "web/manifest.json is damaged: it has no `status`", "a new run"),
    ("report web", 2, "web/manifest.json is damaged: it has no `status`", "a new run"),
    ("report web --to html", 2, "web/manifest.json is damaged: it has no `status`", "a new run"),
    ("compare web web", 2, "web/manifest.json is damaged: it has no `status`", "a new run"),
    ("export web --inspect", 2, "web/manifest.json is damaged: it has no `status`", "a new run"),
    ("publish web --to there", 2, "web/manifest.json is damaged: it has no `status`", "a new run"),
    ("predict web", 2, "web/manifest.json is damaged: it has no `status`", "a new run"),
    ("report strange", 2, "strange contains no output: it has no records.jsonl", "list runs"),
    (
        "report strange strange/",
        2,
        "strange contains no output: it has no records.jsonl",
        "list runs",
    ),
    (
        "compare strange strange",
        2,
        "strange contains no output: it has no records.jsonl",
        "list runs",
    ),
]


@pytest.mark.parametrize(
    ("command", "code", "expected", "hint"), REFUSED, ids=[r[0] for r in REFUSED]
)
def test_a_wrong_command_is_one_error_and_changes_no_file(run, command, code, expected, hint):
    before = contents()
    exit_code, out, err = run(command)
    assert (exit_code, out) == (code, "")
    message, next_step = read_error(err)
    assert expected in message
    assert hint in next_step
    assert contents() == before


# Errors that are found while weights are loaded: the run's folder must be removed.


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("more", ["", "--repeats 2"])
def test_a_missing_device_leaves_no_folder(run, more):
    code, _, err = run(f"run {SMALL} {more}".replace("--device cpu", "--device cuda"))
    message, hint = read_error(err)
    assert code == 3
    assert message.startswith("there is no device cuda: torch ")
    assert message.endswith("sees 0 CUDA devices")
    assert hint == "--device cpu"
    assert not Path("here").exists()


def test_graphs_without_a_gpu_leave_no_folder(run):
    code, _, err = run(f"run {SMALL} --graphs on")
    message, hint = read_error(err)
    assert code == 3
    assert message == "--graphs on: CUDA graphs need a CUDA device, and this run is on cpu"
    assert hint == "choose --device cuda, or leave --graphs out"
    assert not Path("here").exists()


def test_a_prompt_longer_than_the_context_is_refused_before_the_run(run):
    before = contents()
    code, _, err = run(f"run -t own.jsonl -t long.jsonl {SMALL}".replace("--limit 2", ""))
    message, hint = read_error(err)
    assert code == 2
    assert message.startswith("prompt long/0 has 10004 tokens; with 4 new ones that is more than")
    assert "4096 positions" in message
    assert hint.startswith("lower --max-new-tokens, leave the question out")
    assert contents() == before


def test_a_prompt_of_megabytes_is_refused_after_tokenizing_a_prefix(run, monkeypatch):
    monkeypatch.setattr(
        bench, "render_prompt", lambda *_, **__: pytest.fail("all of it was tokenized")
    )
    Path("huge.jsonl").write_text(json.dumps({"prompt": "word " * 2_000_000}) + "\n")
    code, _, err = run(f"run -t huge.jsonl {SMALL}".replace("--limit 2", ""))
    message, hint = read_error(err)
    assert code == 2
    assert message.startswith("prompt huge/0 has more than ")
    assert message.endswith(" tokens; that is more than the 4096 positions of embedded-7m")
    assert hint.startswith("lower --max-new-tokens, leave the question out")
    assert not Path("here").exists()


def test_a_failing_repeat_in_its_own_process_ends_the_run(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code, _, err = run(f"run -t long.jsonl {SMALL} --repeats 2")
    assert code == 2
    assert read_error(err) == ("pass 1 was not finished: its process ended with exit code 2", "")
    assert not Path("here").exists()


def test_output_longer_than_the_context_is_refused(run):
    code, _, err = run(f"run -t own.jsonl {SMALL}".replace("tokens 4", "tokens 5000"))
    assert code == 2
    assert "with 5000 new ones that is more than the 4096 positions" in read_error(err)[0]
    assert not Path("here").exists()


def test_text_beyond_the_rotary_scaling_is_refused_before_the_run(run, copy_model):
    """Beyond the original length all rotary frequencies change (Phi-3, Phi-4-mini)."""
    copy_model("long")
    config = json.loads(Path("long/config.json").read_text())
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors}
    config["rope_parameters"] = rope | {"original_max_position_embeddings": 40}
    Path("long/config.json").write_text(json.dumps(config))
    code, _, err = run(f"run -t own.jsonl {SMALL} --target ./long".replace("tokens 4", "tokens 39"))
    assert code == 2
    assert read_error(err)[0].endswith(
        "more than the 40 positions of long (long: its rotary scaling (longrope) changes beyond"
        " them) (and 1 more failed: own/1)"
    )
    assert not Path("here").exists()


@pytest.fixture
def copy_model(tiny_checkpoint):
    """Return a function that copies a tiny model with the embedded tokenizer to a folder."""

    def copy(name, *, n_moved=0, vocab=4096):
        shutil.copytree(tiny_checkpoint("llama", vocab_size=vocab), name)
        shipped = resolve("embedded-1m").path
        shutil.copy(shipped / "tokenizer_config.json", name)
        tokens = json.loads((shipped / "tokenizer.json").read_text())
        entries = tokens["model"]["vocab"]
        some = [token for token, index in entries.items() if 3000 <= index < 3000 + n_moved]
        ids = [entries[token] for token in some]
        entries.update(zip(some, reversed(ids), strict=True))
        (Path(name) / "tokenizer.json").write_text(json.dumps(tokens))
        return name

    return copy


def test_different_vocabularies_are_refused(run, copy_model):
    copy_model("other", n_moved=8)
    code, _, err = run(f"run -m sps --draft ./other {SMALL}")
    message, hint = read_error(err)
    assert code == 2
    assert message == (
        "other cannot draft for embedded-7m with sps: their vocabularies differ (8 of 4096 tokens"
        " have another id or none)"
    )
    assert hint.startswith("choose a --draft with the target's tokenizer")
    assert "-m tli,uag,omnidraft" in hint
    assert not Path("here").exists()


def test_a_draft_without_some_token_ids_is_refused(run, copy_model):
    copy_model("short", vocab=4000)
    code, _, err = run(f"run -m sps --draft ./short {SMALL}")
    assert code == 2
    assert "(96 of 4096 tokens have another id or none)" in read_error(err)[0]


def test_a_prompt_token_without_an_embedding_is_refused(run, copy_model):
    copy_model("short", vocab=4096)
    tokenizer = Path("short", "tokenizer.json")
    tokens = json.loads(tokenizer.read_text())
    tokens["added_tokens"].append(dict(tokens["added_tokens"][0], id=4096, content="<mark>"))
    tokenizer.write_text(json.dumps(tokens))
    Path("marked.jsonl").write_text('{"id": "m", "prompt": "What is <mark>?"}\n')
    code, _, err = run(f"run --target ./short -t marked.jsonl {SMALL}")
    assert code == 2
    message, hint = read_error(err)
    assert message == (
        "prompt marked/m has the token 4096, and short has 4096 tokens, 0 to 4095: its tokenizer"
        " does not fit its weights"
    )
    assert hint.startswith("compare added_tokens in its tokenizer.json")
    assert not Path("here").exists()


def test_a_draft_with_additional_token_ids_is_accepted(run, copy_model):
    copy_model("longer", vocab=4112)
    tokenizer = Path("longer", "tokenizer.json")
    tokens = json.loads(tokenizer.read_text())
    tokens["model"]["vocab"]["<infill>"] = 4096
    tokenizer.write_text(json.dumps(tokens))
    code, _, err = run(f"run -m sps --draft ./longer --allow-noise {SMALL}".replace("-m pld", ""))
    assert code == 0, err
    assert not any(record.error for record in RunDir.open(Path("here")).records())


def test_a_chat_template_that_rejects_the_conversation_is_an_error(run, copy_model):
    copy_model("strict")
    config = Path("strict", "tokenizer_config.json")
    values = json.loads(config.read_text())
    values["chat_template"] = "{{ raise_exception('a system message comes first') }}"
    config.write_text(json.dumps(values))
    code, _, err = run(f"run --target ./strict {SMALL}")
    assert code == 2
    assert read_error(err) == (
        "prompt mini/qa-079: the chat template of strict rejects the conversation: a system message"
        " comes first (and 1 more failed: mini/rag-018)",
        "use --raw, which applies no chat template",
    )
    assert not Path("here").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_truncated_model_files_are_an_error(run, copy_model, file):
    copy_model("cut")
    path = Path("cut", file)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, _, err = run(f"run --target ./cut {SMALL}")
    message, hint = read_error(err)
    assert code == 3
    assert "cut" in message
    assert hint
    assert not Path("here").exists()


def test_weights_larger_than_memory_are_refused_before_loading(run, monkeypatch):
    class Memory:
        available, total = 1_000_000, 2**34

    monkeypatch.setattr(bench.psutil, "virtual_memory", Memory)
    code, _, err = run(f"run {SMALL}")
    message, hint = read_error(err)
    assert code == 3
    assert message.startswith("embedded-7m: 0.0")
    assert "bytes) of weights in float32" in message
    assert message.endswith("and cpu has 0.001 GB (1,000,000) free")
    assert hint.startswith("--dtype bfloat16 (0.0")
    assert not Path("here").exists()


# Interrupted runs


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Return the folder of a run that was interrupted after its first prompt."""
    append = RunDir.append

    def interrupt(self, records):
        append(self, records)
        raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "own.jsonl").write_text(FILES["own.jsonl"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(RunDir, "append", interrupt)
        command = f"run -t own.jsonl {SMALL} --allow-noise"
        assert app._run(shlex.split(command)) == 130
    return folder / "here"


@pytest.fixture
def interrupted_copy(run, interrupted):
    """Copy the interrupted run into the working folder, and return the copy."""
    shutil.copytree(interrupted, "here")
    return Path("here")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lambda lines: [lines[0][: len(lines[0]) // 2], *lines[1:]],
            "line 1 is not a valid record",
        ),
        (lambda lines: [b"{}", *lines], "line 1 is not a valid record: prompt_id is missing"),
        (lambda lines: [lines[0], lines[0]], "line 2: a second record of "),
        (lambda lines: [b"\xff\xfe", *lines], "line 1 is not UTF-8 text"),
    ],
    ids=["cut", "foreign", "twice", "binary"],
)
def test_a_damaged_record_is_named_and_no_file_changes(run, interrupted_copy, damage, expected):
    file = interrupted_copy / "records.jsonl"
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join(damage(lines)) + b"\n")
    before = contents(interrupted_copy)
    code, _, err = run("run --resume here")
    message, hint = read_error(err)
    assert code == 2
    assert expected in message
    assert "here/records.jsonl" in message
    assert hint.startswith("delete that line: sed -i ")
    assert contents(interrupted_copy) == before


def test_a_line_deleted_as_the_hint_suggests_is_measured_again(run, interrupted_copy):
    file = interrupted_copy / "records.jsonl"
    n_records = len(file.read_bytes().splitlines())
    file.write_bytes(b"garbage\n" + file.read_bytes().split(b"\n", 1)[1])
    assert run("run --resume here")[0] == 2
    file.write_bytes(file.read_bytes().split(b"\n", 1)[1])
    code, _, err = run("run --resume here")
    assert code == 0, err
    assert len(list(RunDir.open(interrupted_copy).records())) == 2 * n_records


def test_a_folder_with_a_run_is_not_overwritten(run, interrupted_copy):
    before = contents(interrupted_copy)
    code, _, err = run(f"run -t own.jsonl {SMALL}")
    assert code == 2
    assert read_error(err) == (
        "here already contains a run",
        "specbench run --resume here, or choose another --out",
    )
    assert contents(interrupted_copy) == before


def test_a_full_disk_keeps_the_stored_records(run, interrupted_copy, monkeypatch):
    before = contents(interrupted_copy)[interrupted_copy / "records.jsonl"]

    def full(path, lines, expected=None):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "append", full)
        code, _, err = run("run --resume here")
    message, hint = read_error(err)
    assert code == 3
    assert re.search(r"here/(prompts|records)\.jsonl: No space left on device$", message)
    assert "specbench run --resume" in hint
    assert (interrupted_copy / "records.jsonl").read_bytes() == before
    assert RunDir.open(interrupted_copy).manifest["status"] == "interrupted"


def test_a_noisy_machine_is_exit_3_and_keeps_the_outputs(run, monkeypatch):
    monkeypatch.setattr(NoiseMeter, "is_full", lambda self: True)
    monkeypatch.setattr(NoiseMeter, "close", lambda self: 0.5)
    code, _, err = run(f"run -t own.jsonl {SMALL}")
    message, hint = read_error(err)
    assert code == 3
    assert message.startswith(
        "the machine was not quiet: for too many outputs, other processes used more than 5%"
    )
    assert "--allow-noise" in hint
    records = list(RunDir.open(Path("here")).records())
    assert all(record.void and record.output_ids for record in records)


def test_a_missing_package_is_not_a_bug(run, monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(app, "get_command", missing)
    code, _, err = run("run")
    assert code == 3
    assert read_error(err) == (
        "the Python package 'torch' is not installed",
        "pip install specbench-cli",
    )
