"""The notebook of the docs: executed as a reader would, and small as it is committed."""

import json
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[1] / "docs/tutorials/tour.ipynb"


def test_the_notebook_is_committed_small_executed_without_an_error_and_without_times():
    text = TOUR.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert len(text) < 40_000
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    shown = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in shown if output["output_type"] == "error"]
    assert all(not cell["outputs"] for cell in cells if "times" in cell["metadata"].get("tags", ()))
    assert not [word for word in ("speedup", "ns_") if word in json.dumps(shown)]


@pytest.mark.notebook
def test_every_cell_of_the_notebook_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(TOUR, as_version=4)
    committed = [bool(cell.get("outputs")) for cell in notebook.cells]
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    shown = [
        {kind for output in cell.outputs for kind in output.get("data", {"text/plain": ""})}
        if cell.cell_type == "code"
        else set()
        for cell in notebook.cells
    ]
    assert all(shown[at] for at, had in enumerate(committed) if had)
    html = "".join(
        output["data"].get("text/html", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "data" in output
    )
    assert "<caption>Lossless methods</caption>" in html  # a run by itself
    assert '<iframe sandbox="allow-scripts"' in html  # run.show(), which knows a notebook
