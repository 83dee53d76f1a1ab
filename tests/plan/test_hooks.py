"""Declaration hooks of a method return the right types, or are named in an error."""

import pytest

from specbench_cli import registry
from specbench_cli.errors import UsageError
from specbench_cli.plan.method_run import MethodRun


@pytest.mark.parametrize(
    ("hook", "returned", "message"),
    [
        ("models", "embedded-1m", "models must return a tuple of names of models, got str"),
        ("models", (3,), "models must return a tuple of names of models, got tuple"),
        ("artifacts", None, "artifacts must return a tuple of ArtifactSpec modules, got None"),
        (
            "artifacts",
            ("head",),
            "artifacts must return a tuple of ArtifactSpec modules, got tuple",
        ),
    ],
)
def test_a_hook_that_returns_a_wrong_type_is_rejected(hook, returned, message):
    wrong = type("Wrong", (registry.load("pld"),), {"name": "mine", hook: lambda self: returned})
    with pytest.raises(UsageError, match=f"^mine: {message}"):
        MethodRun.from_method("mine", "mine", wrong(), {}).check_hooks()


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("accept", "typical", "accept must return an AcceptRule or None, got str 'typical'"),
        ("requirements", "draft", "requirements must return a set of words, got str 'draft'"),
        ("scope", "forever", "scope must return prompt, run or corpus, got str 'forever'"),
    ],
)
def test_a_property_of_a_wrong_type_is_rejected(attribute, value, message):
    wrong = type("Wrong", (registry.load("pld"),), {"name": "mine", attribute: value})
    with pytest.raises(UsageError, match=f"^mine: {message}"):
        MethodRun.from_method("mine", "mine", wrong(), {}).check_hooks()


def test_hooks_of_built_in_methods_return_the_right_types():
    for name in registry.built_in_methods():
        MethodRun(name, name, {}).check_hooks()
