"""What is built and installed: a pure wheel with all its data files, its extras and its entry point."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from dask_gpurt.model.checks import SUPPORTED

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[2]
EXTRAS = {"codecs", "dashboard", "docs", "jupyter", "ucx", "cu12", "cu13", "s3", "bench", "test"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")  # a copy: building writes beside the sources
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("dask_gpurt", "plugins", "tests/house"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)],
        check=True,
    )
    (built,) = out.iterdir()
    return built


def test_pure_and_complete(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "dask_gpurt").rglob("*")
        if p.suffix in (".py", ".yaml", ".html", ".css") or p.name == "py.typed"
    }
    assert {n for n in names if n.startswith("dask_gpurt/")} == expected
    assert not any(n.startswith(("tests/", "plugins/", "benchmarks/")) for n in names)


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        (name,) = (n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
        meta = email.message_from_string(z.read(name).decode())
        (entry,) = (n for n in z.namelist() if n.endswith("entry_points.txt"))
        assert "[dask_cli]\ngpurt = dask_gpurt.cli:gpurt" in z.read(entry).decode()
    assert set(meta.get_all("Provides-Extra") or ()) == EXTRAS
    base = [r for r in meta.get_all("Requires-Dist") or () if "extra ==" not in r]
    (distributed,) = (r for r in base if r.startswith("distributed"))
    assert SpecifierSet(distributed.removeprefix("distributed")) == SpecifierSet(SUPPORTED)
    assert not any(r.startswith(("cudf", "rmm", "ucxx", "nvidia")) for r in base), "the base install needs no GPU"
    assert meta["License-Expression"] == "BSD-3-Clause" or meta["License"] == "BSD-3-Clause"
