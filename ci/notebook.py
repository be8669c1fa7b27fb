"""Run the notebooks in examples/ on live clusters, and store their outputs in them.

    PYTHONPATH=. python ci/notebook.py [NOTEBOOK...]

Needs nbclient and ipykernel. Outputs with a path of this machine are refused; tests/examples holds what is stored.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile

import nbclient
import nbformat

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
#: bytes of a notebook, at most
LARGEST = 1_000_000
#: seconds of a cell, at most
CELL_SECONDS = 180


def local_paths(notebook: nbformat.NotebookNode) -> list[str]:
    """What in the outputs are paths of this machine."""
    own = (str(EXAMPLES.parent), str(pathlib.Path.home()) + "/", tempfile.gettempdir() + "/")
    text = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    return [path for path in own if path in text]


def store(path: pathlib.Path) -> None:
    """Run one from top to bottom, in a folder of its own, and write it with its outputs."""
    notebook = nbformat.read(path, 4)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=CELL_SECONDS, record_timing=False, resources={"metadata": {"path": folder}}
        )
        client.execute()
    if found := local_paths(notebook):
        raise RuntimeError(f"outputs of {path.name} have paths of this machine: {', '.join(found)}")
    text = nbformat.writes(notebook, 4)
    if len(text) > LARGEST:
        raise RuntimeError(f"{path.name} has {len(text):,} bytes, must be at most {LARGEST:,}")
    path.write_text(text + "\n", encoding="utf-8")
    print(f"{path.name}: {len(text):,} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=pathlib.Path)
    for path in parser.parse_args().notebooks or sorted(EXAMPLES.glob("*.ipynb")):
        store(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
