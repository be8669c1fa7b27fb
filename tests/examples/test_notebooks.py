"""Every notebook in examples/ runs from top to bottom, and shows what its text promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from ci.notebook import LARGEST, local_paths  # noqa: E402  (it needs the above)

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def _outputs(notebook: Any, source: str) -> list[Any]:
    """Of the one cell whose source has that text."""
    (cell,) = [c for c in notebook.cells if c.cell_type == "code" and source in c.source]
    return list(cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_outputs_are_stored_whole_and_without_paths_of_a_machine(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < LARGEST
    assert local_paths(notebook) == []
    assert not re.search(r"[^\w.](/home/|/root/|/tmp/|/Users/|site-packages)", str([cell.outputs for cell in code]))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    _shows(notebook)


def _shows(notebook: Any) -> None:
    """What the text of the tour promises."""
    for ask in ("\ndask_gpurt.explain(", "dask_gpurt.where("):
        (shown,) = [o for o in _outputs(notebook, ask) if o.output_type == "execute_result"]
        assert {"text/plain", "text/html"} <= set(shown.data)
    assert re.search(r"spilling\s+wrote .*B", _outputs(notebook, "print(dask_gpurt.status(")[0].text)
    assert "spill" in _outputs(notebook, "advise(")[0].text
    assert "finished" in _outputs(notebook, "gpurt trace")[0].text
    replayed = "".join(o.text for o in _outputs(notebook, "gpurt replay"))
    assert "stock" in replayed
    assert "gpurt" in replayed


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _shows(notebook)
