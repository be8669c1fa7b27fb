"""The direction of imports, as in docs/design.md: each package may know only the ones named for it, without circles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.imports import circles, graph, imported

PACKAGE = Path(__file__).parents[2] / "dask_gpurt"

EVERYBODY = {"errors", "_version", "model"}
#: top-level part -> parts it may import besides itself and EVERYBODY
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "model": set(),
    "config_schema": set(),
    "config": {"config_schema"},
    "memory": set(),
    "topology": set(),
    "planning": set(),
    "backends": {"memory"},
    "placement": {"config", "topology"},
    "tiers": {"config", "backends", "memory"},
    "shuffle": {"config", "backends", "memory"},
    "observe": {"config", "topology"},
    "preflight": {"backends"},
    "quarantine": {"backends", "doctor", "preflight"},
    "simulate": {"config", "topology", "placement", "observe"},
    "testing": {"tiers"},
    "extension": {
        "config",
        "backends",
        "doctor",
        "memory",
        "observe",
        "placement",
        "preflight",
        "quarantine",
        "tiers",
        "shuffle",
    },
    "command": set(),
    "preload": {"command", "config", "config_schema", "extension", "observe", "planning"},
    "load": {"preload"},
    "doctor": {"config", "config_schema", "backends", "tiers"},
    "client": {"backends", "config", "config_schema", "doctor", "extension", "observe", "placement", "planning"},
    "bench": {"client", "observe", "planning"},
    "cli": {"bench", "client", "config", "doctor", "observe", "simulate"},
    "__init__": {"config", "client"},
}
VENDOR = {"cudf", "cupy", "rmm", "pynvml", "pylibcudf", "amdsmi", "kvikio", "ucxx", "dask_cuda", "numba"}


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
        for name in imported(path):
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


@pytest.mark.parametrize("module", ["dask_gpurt.extension.worker", "dask_gpurt.preload"])
def test_a_worker_imports_its_own_half_alone(module: str) -> None:
    """A worker that is attached to imports the first, one with a preload the second. It stays in its memory for good,
    also after a detach: pyarrow alone is 24 MB, and pauses a small worker that stock would not pause. And the worker
    starts as late as its imports take."""
    import subprocess
    import sys

    code = (
        f"import sys, distributed.cli.dask_worker; stock = set(sys.modules); import {module};"
        "ours = set(sys.modules) - stock;"
        "heavy = {'pyarrow', 'pandas', 'bokeh', 'dask.dataframe', 'dask_gpurt.extension.scheduler',"
        " 'dask_gpurt.shuffle.scheduler.takeover', 'dask_gpurt.shuffle.worker.run',"
        " 'dask_gpurt.shuffle.transport.plane',"
        " 'dask_gpurt.tiers.device.setup', 'dask_gpurt.tiers.shared.worker', 'dask_gpurt.tiers.storage.object.tier',"
        " 'dask_gpurt.placement.plugin', 'dask_gpurt.observe.collect.stall_ledger'} & ours;"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_circle_of_imports() -> None:
    """Imports for type checkers and inside of functions count too."""
    found = [sorted(circle) for circle in circles(graph(PACKAGE))]
    assert found == [], "modules that import each other; open it with a Protocol, or move the shared names down"


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("from p.b import B", "from p.a import A", True),
        ("from p import b", "import p.a", True),
        ("if TYPE_CHECKING:\n    from p.b import B", "def f():\n    from p.a import A", True),
        ("from p.b import B", "from p import c", False),
        ("import p", "from p.a import A", False),
    ],
)
def test_a_circle_is_found(first: str, second: str, found: bool, tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    for name, text in (("__init__", ""), ("a", first), ("b", second), ("c", "")):
        (package / f"{name}.py").write_text(text)
    assert circles(graph(package)) == ({frozenset({"p.a", "p.b"})} if found else set())
