"""Tests that the notebook in docs/ runs, and that its committed file is small."""

import json
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[1] / "docs/tutorials/tour.ipynb"


def test_the_committed_notebook_is_small_and_has_no_errors_or_times():
    text = TOUR.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert len(text) < 40_000
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert all(not cell["outputs"] for cell in cells if "times" in cell["metadata"].get("tags", ()))
    assert not [word for word in ("speedup", "ns_") if word in json.dumps(outputs)]


@pytest.mark.notebook
def test_every_cell_of_the_notebook_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(TOUR, as_version=4)
    committed = [bool(cell.get("outputs")) for cell in notebook.cells]
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = [
        {kind for output in cell.outputs for kind in output.get("data", {"text/plain": ""})}
        if cell.cell_type == "code"
        else set()
        for cell in notebook.cells
    ]
    assert all(outputs[at] for at, had_outputs in enumerate(committed) if had_outputs)
    html = "".join(
        output["data"].get("text/html", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "data" in output
    )
    # A run as the last value of a cell shows its table; `run.show()` shows the report in a frame.
    assert "<caption>Lossless methods</caption>" in html
    assert '<iframe sandbox="allow-scripts"' in html
