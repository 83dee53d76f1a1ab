"""The path of a draft in docs/explanations/architecture.md is the path in the code."""

import re
import sys
from pathlib import Path

import methods
from methods.sps import Sps, SpsParams
from specbench_cli.engine.verify.sampling import Sampling

ROOT = Path(methods.__path__[0]).parent
PAGE = (ROOT / "docs/explanations/architecture.md").read_text(encoding="utf-8")


def stations() -> list[tuple[str, str]]:
    """Return the file and the function of each step on the page."""
    _, section = PAGE.split("## A draft, from proposal to verdict\n")
    section = section.split("\n## ")[0]
    return re.findall(r"^\|[^|]*\| `([\w/.]+)` \| `([\w.]+)` \|", section, re.MULTILINE)


def test_a_draft_passes_the_functions_of_the_page_in_order(open_session, random_table):
    table = random_table(5, 1, 1.0)
    sampling = Sampling("rejection", 0.8, seed=5)
    session = open_session(table, draft=table, prompt=(1, 2, 3), sampling=sampling)
    session.harness.begin()
    steps = Sps(SpsParams(length=1)).generate(session)
    calls: list[tuple[str, str]] = []

    def profile(frame, event, _):
        if event == "call":
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    next(steps)
    sys.setprofile(profile)
    try:
        next(steps)
    finally:
        sys.setprofile(None)
    table_of_the_page = [(str(ROOT / file), name) for file, name in stations()]
    assert len(table_of_the_page) == 13
    walk = [call for call in calls if call in table_of_the_page]
    # The draft model's forward, between `propose` and `pick`, also passes the meter.
    forward = (str(ROOT / "specbench_cli/engine/models/meter.py"), "Metered.execute")
    walk.remove(forward)
    assert list(dict.fromkeys(walk)) == table_of_the_page
