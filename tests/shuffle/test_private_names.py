"""Private names of distributed are in `shuffle.seam` only, and each of them is inspected before an installation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import dask_gpurt.shuffle
from dask_gpurt.errors import SeamMismatch
from dask_gpurt.shuffle import seam

ROOT = Path(dask_gpurt.shuffle.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "seam.py")
#: names in the tables of `seam`
INSPECTED = {name for _, name, _ in seam.METHODS} | {name for *_, name in (*seam.ATTRIBUTES, *seam.FIELDS)}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: list[ast.Module]) -> set[str]:
    """Private names that the shuffle defines itself: functions, classes, attributes of ``self`` and of classes."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if private(name)}


def is_own_object(value: ast.expr) -> bool:
    """``self``, ``cls`` or ``super()``: of a class of ours, which may inherit from one of distributed's."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def offences(tree: ast.Module, own: set[str]) -> list[str]:
    """What a module must not do."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [module, *(alias.name if not module else f"{module}.{alias.name}" for alias in node.names)]
            if any(
                name.split(".")[0] in ("dask", "distributed") and any(map(private, name.split("."))) for name in names
            ):
                found.append(f"line {node.lineno}: imports {names}")
        elif isinstance(node, ast.Attribute) and private(node.attr):
            # What distributed's classes have, ours inherit: by ``self``, and only if it is inspected.
            wrong = node.attr not in own | INSPECTED if is_own_object(node.value) else node.attr not in own - INSPECTED
            if wrong:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def parsed() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in MODULES}


def test_no_other_module_names_private_parts():
    trees = parsed()
    own = own_names(list(trees.values()))
    found = {str(path.relative_to(ROOT)): some for path, tree in trees.items() if (some := offences(tree, own))}
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "from distributed.shuffle._core import ShuffleRun",
        "import distributed.shuffle._core",
        "from distributed.shuffle import _core",
        "plugin._unset_restriction(ts)",
        "scheduler._ongoing_background_tasks.call_soon(f)",
        "run._comm_buffer.flush()",
        "self._nothing_that_is_inspected()",
    ],
)
def test_what_is_forbidden_is_found(line):
    own = own_names(list(parsed().values()))
    assert offences(ast.parse(line), own)


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, name, _ in seam.METHODS], ids=str)
def test_a_method_that_is_gone_is_a_mismatch(owner, name, monkeypatch):
    seam.check()
    monkeypatch.delattr(owner, name)
    with pytest.raises(SeamMismatch, match=rf"{owner.__name__}\.{name}\(missing\)"):
        seam.check()


@pytest.mark.parametrize(("owner", "method", "name"), seam.ATTRIBUTES, ids=str)
def test_an_attribute_that_is_gone_is_a_mismatch(owner, method, name, monkeypatch):
    function = inspect.unwrap(vars(owner)[method])
    names = tuple(f"{one}_renamed" if one == name else one for one in function.__code__.co_names)
    monkeypatch.setattr(function, "__code__", function.__code__.replace(co_names=names))
    with pytest.raises(SeamMismatch, match=rf"{owner.__name__}\.{name} is not set by {method}"):
        seam.check()


class Calls(seam._ShuffleRunManager):
    def __init__(self, plugin):
        super().__init__(plugin)
        self.more = plugin


class Inherits(Calls):
    pass


class Replaces(seam._ShuffleRunManager):
    def __init__(self, plugin):
        self.more = plugin


@pytest.mark.parametrize(("owner", "fits"), [(Calls, True), (Inherits, True), (Replaces, False)])
def test_a_base_class_may_set_the_attributes(owner, fits, monkeypatch):
    """Other code may have put a subclass in the place of one of distributed's classes, as upstream's tests do."""
    rows = [row for row in seam.ATTRIBUTES if row[0] is seam._ShuffleRunManager]
    assert rows
    monkeypatch.setattr(seam, "ATTRIBUTES", tuple((owner, *rest) for _, *rest in rows))
    with nullcontext() if fits else pytest.raises(SeamMismatch, match=r"Replaces\.closed is not set by __init__"):
        seam.check()


@pytest.mark.parametrize(("owner", "name"), seam.FIELDS, ids=str)
def test_a_field_that_is_gone_is_a_mismatch(owner, name, monkeypatch):
    assert name in {field.name for field in dataclasses.fields(owner)}
    monkeypatch.delitem(owner.__dataclass_fields__, name)
    with pytest.raises(SeamMismatch, match=f"{owner.__name__} has no field {name}"):
        seam.check()


def test_another_annotation_is_a_mismatch(monkeypatch):
    function = inspect.unwrap(seam.ShuffleSchedulerPlugin._set_restriction)
    constants = tuple("another" if one == seam._RESTRICTED else one for one in function.__code__.co_consts)
    monkeypatch.setattr(function, "__code__", function.__code__.replace(co_consts=constants))
    with pytest.raises(SeamMismatch, match="does not annotate"):
        seam.check()


def test_functions_of_other_libraries_are_inspected(monkeypatch):
    from pandas.core.dtypes import cast

    monkeypatch.delattr(cast, "find_common_type")
    with pytest.raises(SeamMismatch, match="find_common_type"):
        seam.check()


def test_a_cluster_starts_without_pandas():
    """Many clusters never see a frame, and to import it takes 0.2 s and more."""
    code = (
        "import sys, distributed, dask_gpurt\n"
        "with (\n"
        "    dask_gpurt.local_cluster(n_workers=1, processes=False, dashboard_address=None) as cluster,\n"
        "    distributed.Client(cluster) as client,\n"
        "):\n"
        "    assert client.submit(len, 'ab').result() == 2\n"
        "    assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
