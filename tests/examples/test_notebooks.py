"""Every notebook in examples/ runs from top to bottom, and shows what its text promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def _outputs(notebook: Any, source: str) -> list[Any]:
    """Of the one cell whose source has that text."""
    (cell,) = [c for c in notebook.cells if c.cell_type == "code" and source in c.source]
    return list(cell.outputs)


def test_they_are_stored_without_outputs() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "code":
                assert cell.outputs == []
                assert cell.execution_count is None


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    if path.name == "tour.ipynb":
        for ask in ("dask_gpurt.status(", "dask_gpurt.explain(", "dask_gpurt.where("):
            (shown,) = [o for o in _outputs(notebook, ask) if o.output_type == "execute_result"]
            assert {"text/plain", "text/html"} <= set(shown.data)
        assert "finished" in _outputs(notebook, "summary(")[0].text
