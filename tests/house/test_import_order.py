"""The direction of imports, as in docs/design.md: each package may know only the ones named for it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parents[2] / "dask_gpurt"

EVERYBODY = {"errors", "_version", "model"}
#: top-level part -> parts it may import besides itself and EVERYBODY
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "model": set(),
    "config": set(),
    "memory": set(),
    "topology": set(),
    "backends": set(),
    "placement": {"config", "topology"},
    "tiers": {"config", "backends", "memory"},
    "shuffle": {"config", "backends", "memory"},
    "observe": {"config", "topology"},
    "simulate": {"config", "topology", "placement", "tiers", "observe"},
    "testing": set(),
    "extension": {"config", "backends", "observe", "placement", "tiers", "shuffle"},
    "preload": {"config", "extension", "observe"},
    "client": {"config", "extension", "observe", "placement"},
    "cli": {"client", "config", "observe", "simulate"},
    "__init__": {"config", "client"},
}
VENDOR = {"cudf", "cupy", "rmm", "pynvml", "pylibcudf", "amdsmi", "kvikio", "ucxx", "dask_cuda", "numba"}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == "dask_gpurt":
                yield from (f"dask_gpurt.{a.name}" for a in node.names)
            else:
                yield node.module


def _part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def violations(files: list[Path]) -> list[str]:
    out = []
    for path in files:
        part = _part(path)
        if part not in ALLOWED:
            out.append(f"{path}: {part} is not in the list of parts")
            continue
        for name in _imports(path):
            root, *rest = name.split(".")
            if root in VENDOR and part != "backends":
                out.append(f"{path} imports {name}: vendor libraries are for backends/ only")
            if root == "dask_gpurt" and rest and rest[0] not in ALLOWED[part] | EVERYBODY | {part}:
                out.append(f"{path} imports {name}: {part} may not know {rest[0]}")
    return out


def test_imports_point_down() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 15
    assert violations(files) == []


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("tiers/x.py", "from dask_gpurt.shuffle import stores"),
        ("model/x.py", "import dask_gpurt.config"),
        ("placement/x.py", "import rmm"),
        ("elsewhere/x.py", "import os"),
    ],
)
def test_a_wrong_import_is_found(place: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / place
    bad.parent.mkdir()
    bad.write_text(text)
    monkeypatch.setattr("tests.house.test_import_order.PACKAGE", tmp_path)
    assert len(violations([bad])) == 1


def test_importing_the_package_is_light() -> None:
    """Every `dask` command imports the entry point; it must not bring distributed, pandas or a GPU library with it."""
    import subprocess
    import sys

    code = (
        "import sys, dask_gpurt.cli;"
        "heavy = {'distributed', 'pandas', 'pyarrow', 'cudf', 'rmm', 'bokeh'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
