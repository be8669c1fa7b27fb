"""Private names of distributed and zict: used in the seam alone, and looked up before anything is changed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from distributed.spill import SpillBuffer
from distributed.utils_test import gen_cluster

import dask_gpurt.model
import dask_gpurt.tiers
from dask_gpurt.errors import SeamMismatch
from dask_gpurt.tiers.engine.engine import Engine
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from dask_gpurt.tiers.worker import seam, spill_buffer
from tests.tiers.conftest import guard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Scheduler, Worker

TIERS = Path(dask_gpurt.tiers.__file__).parent
MODEL = Path(dask_gpurt.model.__file__).parent
READS = TIERS / "read_cache" / "seam.py"
SEAM = {TIERS / "worker" / "seam.py", TIERS / "worker" / "spill_buffer.py", READS}
#: what Dask wraps a fragment of a data set in; without them its reader is not asked
FRAGMENTS = {"_fragment", "_fragment_packed"}
#: private names of pandas, by which frames are looked into; without them their sizeof counts
PANDAS = {"_mgr", "_pa_array"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a module gives to functions, classes and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def foreign(tree: ast.AST, ours: set[str]) -> set[str]:
    """Private names that a module uses and that it does not define; `ours`: what our base classes define."""
    own = set(defined(tree))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if node.attr not in own and not (of_self(node) and node.attr in ours):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "setattr", "delattr", "hasattr") and isinstance(node.args[1], ast.Constant):
                name = str(node.args[1].value)
                found |= {name} if private(name) and name not in own else set()
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("dask_gpurt"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {name for name in names if private(name)}
        elif isinstance(node, ast.Import):
            found |= {name for alias in node.names for name in alias.name.split(".") if private(name)}
    return found


MODULES = {path: ast.parse(path.read_text()) for path in sorted(TIERS.rglob("*.py"))}
OURS = {
    name
    for tree in [*MODULES.values(), *(ast.parse(p.read_text()) for p in MODEL.rglob("*.py"))]
    for name in defined(tree)
}


@pytest.mark.parametrize("path", [p for p in MODULES if p not in SEAM], ids=lambda p: str(p.relative_to(TIERS)))
def test_only_the_seam_uses_private_names(path: Path) -> None:
    assert foreign(MODULES[path], OURS) <= PANDAS


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from distributed.worker import _x", "_x"),
        ("from distributed._x import y", "_x"),
        ("import zict._x", "_x"),
        ("worker._x()", "_x"),
        ("class A(Plugin):\n    def f(self):\n        return self._x", "_x"),
        ("getattr(worker, '_x')", "_x"),
    ],
)
def test_the_test_finds(source: str, name: str) -> None:
    assert foreign(ast.parse(source), set()) == {name}


@pytest.mark.parametrize("path", sorted(SEAM), ids=lambda p: p.name)
def test_what_the_seam_uses_is_in_its_tables(path: Path) -> None:
    tables = {name for entry in (*seam.NAMES, *spill_buffer.NAMES) for name in entry.split(".")}
    tables |= FRAGMENTS if path == READS else set()
    assert foreign(MODULES[path], OURS) <= tables


def remove(patch: pytest.MonkeyPatch, root: Any, path: str) -> None:
    """Delete what a dotted path names, from the object and from all classes that define it."""
    *way, last = path.split(".")
    for name in way:
        root = getattr(root, name)
    for owner in (root, *type(root).__mro__):
        if last in getattr(owner, "__dict__", ()):
            patch.delattr(owner, last)


@pytest.mark.parametrize("path", spill_buffer.NAMES)
def test_each_name_of_a_spill_buffer_is_looked_up(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = SpillBuffer(str(tmp_path / "storage"), target=1)
    spill_buffer.check(data)
    with monkeypatch.context() as patch:
        remove(patch, data, path)
        with pytest.raises(SeamMismatch, match=r"SpillBuffer\.\S+ does not exist.*Remedy"):
            spill_buffer.check(data)
    spill_buffer.check(data)


@pytest.mark.cluster
def test_each_name_of_a_worker_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @gen_cluster(nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "100 MB"})
    async def test(s: Scheduler, a: Worker) -> None:
        engine = Engine(DiskTier(str(tmp_path / "disk")), budget_bytes=None)
        seam.WorkerSeam(a, engine, guard())
        original = a.data
        for path in seam.NAMES:
            # In one step of the loop: the worker itself does not notice.
            with monkeypatch.context() as patch:
                remove(patch, a, path)
                with pytest.raises(SeamMismatch, match=r"worker\.\S+ does not exist.*Remedy"):
                    seam.WorkerSeam(a, engine, guard())
        assert a.data is a.state.data is original
        await engine.close()

    test()
