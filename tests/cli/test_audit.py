"""`specbench audit`: certificates on stdout and on disk, exit codes, and resumption."""

import hashlib
import json
from pathlib import Path

import pytest

from specbench_cli import app, registry
from specbench_cli.audit import runner
from specbench_cli.judge.broken import find_failed_audit

PLUGIN = Path(__file__).parents[1] / "audit" / "plugins" / "confident.py"


@pytest.fixture
def audit(capsys, tmp_path, monkeypatch, short_audit):
    """Return a function that runs `specbench audit` in an empty folder.

    The function returns exit code, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "")
    monkeypatch.setattr(registry, "_plugin_methods", {})
    monkeypatch.setattr(
        runner, "usable_cpus", lambda: 1
    )  # tests/audit/test_audit.py tests several processes

    def call(*args):
        code = app._run(["audit", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_method_that_passes_the_audit_gets_a_certificate(audit, tmp_path):
    code, out, err = audit("pld", "--out", "certificates")
    assert code == 0
    assert out.splitlines()[-1] == "pld: PASSED"
    assert "PASSED in" in err
    facts = json.loads((tmp_path / "certificates" / "pld.json").read_text())
    source = Path(registry.load("pld").__module__.replace(".", "/") + ".py")
    assert facts["source"] == source.as_posix()
    assert facts["sha256"] == hashlib.sha256(Path(_file("pld")).read_bytes()).hexdigest()
    checks = {check["check"]: check for check in facts["checks"]}
    assert checks.keys() >= {
        "distribution",
        "tokens",
        "order",
        "states",
        "counters",
        "clock",
        "model",
        "caches",
        "embedded",
    }
    assert checks["distribution"]["figure"]["total_variation"] < 1e-9
    assert checks["distribution"]["figure"]["outcomes"] > 100
    assert all(check["passed"] for check in checks.values())
    assert str(tmp_path) not in json.dumps(facts)
    assert str(Path(_file("pld")).parent.parent) not in json.dumps(facts)


def _file(name):
    import inspect

    return inspect.getfile(registry.load(name))


def test_a_plug_in_with_a_wrong_distribution_fails_and_its_fixed_version_passes(audit, tmp_path):
    code, out, _ = audit("--plugin", PLUGIN)
    assert code == 1
    assert "confident: BROKEN by distribution" in out
    assert "look   q, which must be the distribution that each draft token was drawn from" in out
    assert "the distribution of the output is not the target's: total variation" in out
    # Reports mark methods of a plug-in file as broken if its certificate failed.
    digest = hashlib.sha256(PLUGIN.read_bytes()).hexdigest()
    assert (
        find_failed_audit("confident", digest) == "its audit says BROKEN: specbench audit confident"
    )
    assert find_failed_audit("confident", "0" * 64) is None

    fixed = tmp_path / "mended.py"
    text = PLUGIN.read_text().replace("_, q = session.pick(out, ahead)\n            ", "")
    fixed.write_text(text.replace("(token, q)", "(token, None)").replace("confident", "modest"))
    code, out, _ = audit("--plugin", fixed, "--json")
    assert code == 0
    (facts,) = map(json.loads, out.splitlines())
    assert (facts["method"], facts["verdict"], facts["source"]) == ("modest", "PASSED", "mended.py")
    assert facts["version"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no method to audit"),
        (("--all", "sps"), "--all audits every method"),
        (("engine:http",), "engine:http uses another engine"),
        (("spss",), "there is no method 'spss'"),
        (("--plugin", "missing.py"), "the plug-in file missing.py"),
    ],
)
def test_an_invalid_audit_is_an_error(audit, args, message):
    code, out, err = audit(*args)
    assert (code, out) == (2, "")
    assert message in err


def test_help_has_examples(audit):
    code, out, _ = audit("--help")
    assert code == 0
    assert "specbench audit --plugin my_method.py" in out


def test_an_interrupted_audit_resumes(audit, monkeypatch):
    assert audit("vanilla,hf:vanilla", "--out", "kept")[0] == 0
    Path("kept/hf-vanilla.json").unlink()
    code, out, err = audit("vanilla,hf:vanilla", "--out", "kept", "--resume")
    assert code == 0
    assert "1 of 2 certificates in kept are up to date" in err
    assert "hf:vanilla: AGREES in" in err
    assert "\nvanilla: PASSED in" not in err
    assert [line.split("\t")[0] for line in out.splitlines()] == ["method", "vanilla", "hf:vanilla"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('needs = "draft"', "`needs` of Bad is 'draft', of type str"),
        ("Params = dict", "`Params` of Bad is <class 'dict'>, of type type"),
        ('workers = "two"', "`workers` of Bad is 'two', of type str"),
        ("bonus = 1", "`bonus` of Bad is 1, of type int"),
        ('state_scope = "pass"', "`state_scope` of Bad is 'pass'"),
        ('needs = "d" * 5000', "of type str"),
    ],
)
def test_a_class_attribute_of_the_wrong_type_is_named(audit, tmp_path, line, message):
    file = tmp_path / "bad.py"
    text = "from specbench_cli.api import Method\n\n\nclass Bad(Method):\n"
    file.write_text(f'{text}    """Bad."""\n\n    {line}\n')
    code, out, err = audit("--plugin", file)
    assert (code, out) == (2, "")
    assert message in err
    assert "must be" in err
    assert len(err) < 1_000


def test_each_audited_method_is_one_line(audit):
    code, out, _ = audit("vanilla,hf:vanilla")
    assert code == 0
    heading, *rows = (line.split("\t") for line in out.splitlines())
    assert heading[:2] == ["method", "verdict"]
    assert [row[:2] for row in rows] == [["vanilla", "PASSED"], ["hf:vanilla", "AGREES"]]
