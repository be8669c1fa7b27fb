"""Every call of `CudfFrames` against the installed cuDF: its name is there, and takes these arguments.

cuDF can be imported without a GPU, so this runs where no other test of cuDF does. It needs Python 3.12 and the wheels
``cudf-cu13``, ``pylibcudf-cu13`` and ``rmm-cu13`` 26.10 with what they load. In an environment that has them::

    python -m pytest -q -p no:cacheprovider tests/backends/test_cudf_calls.py

What the calls do is for `tests/conformance/test_device_frames.py` on a GPU. The lines that only that proves are counted
here: there are at most `MOST_UNPROVEN`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).parents[2] / "dask_gpurt" / "backends" / "cudf_frames.py"
MOST_UNPROVEN = 40
#: methods of objects that calls return: (class, method, positional arguments given)
METHODS = [
    ("cudf.DataFrame", "to_pylibcudf", 0),
    ("cudf.DataFrame", "astype", 1),
    ("cudf.Series", "to_pylibcudf", 0),
    ("cudf.Index", "to_pylibcudf", 0),
    ("cudf.Index", "astype", 1),
    ("cudf.Index", "rename", 1),
    ("pylibcudf.Column", "to_arrow", 0),
    ("pylibcudf.Table", "columns", 0),
    ("pylibcudf.Table", "num_rows", 0),
    ("pylibcudf.contiguous_split.PackedColumns", "release", 0),
    ("rmm.pylibrmm.stream.Stream", "synchronize", 0),
]
#: attributes of objects that calls return
ATTRIBUTES = [("pylibcudf.gpumemoryview", "nbytes"), ("pylibcudf.gpumemoryview", "ptr")]


class _Array:
    """No bytes, as a device array says it."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {
        "data": (0, False),
        "shape": (0,),
        "strides": None,
        "typestr": "|u1",
        "version": 3,
    }


#: classes that have no signature: (arguments given: how many, and names; how to make one without a device)
MADE: dict[str, tuple[tuple[int, list[str]], Callable[[Any], Any]]] = {
    "pylibcudf.DataType": ((1, []), lambda kind: kind(found("pylibcudf.TypeId.INT32"))),
    "pylibcudf.Table": ((1, []), lambda kind: kind([])),
    "pylibcudf.gpumemoryview": ((1, []), lambda kind: kind(_Array())),
}
needs_cudf = pytest.mark.skipif(
    importlib.util.find_spec("cudf") is None, reason="cuDF is not installed here; see the module for how to run this"
)


def roots(tree: ast.Module) -> dict[str, str]:
    """Name in the module -> what of a library it is."""
    out = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            out.update({a.asname or a.name: a.name for a in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module:
            out.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return {name: path for name, path in out.items() if path.split(".")[0] in ("cudf", "pylibcudf", "rmm")}


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """What of a library an expression names; "" when it does not."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (before := dotted(node.value, known)):
        return f"{before}.{node.attr}"
    return ""


def found(path: str) -> Any:
    """The object of a path. A class comes before the module that it is in and that has its name."""
    root, *words = path.split(".")
    value, name = importlib.import_module(root), root
    for word in words:
        name = f"{name}.{word}"
        value = getattr(value, word) if hasattr(value, word) else importlib.import_module(name)
    return value


def takes(call: Any, positional: int, names: list[str]) -> None:
    """Raise TypeError unless a function or class takes these arguments."""
    inspect.signature(call).bind(*[None] * positional, **dict.fromkeys(names))


TREE = ast.parse(SOURCE.read_text())
NAMES = roots(TREE)
CALLS = [node for node in ast.walk(TREE) if isinstance(node, ast.Call) and dotted(node.func, NAMES)]


def test_there_are_calls_to_check() -> None:
    assert len(CALLS) > 15
    assert {"cudf", "plc", "rmm", "pack_table"} <= NAMES.keys()


def test_few_lines_are_left_to_a_gpu() -> None:
    """Lines of methods that name a library, or what a call of one gave."""
    lines = {
        node.lineno for node in ast.walk(TREE) if isinstance(node, (ast.Name, ast.Attribute)) and dotted(node, NAMES)
    }
    methods = {name for _, name, _ in METHODS}
    lines |= {
        node.lineno
        for node in ast.walk(TREE)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods
    }
    assert len(lines) <= MOST_UNPROVEN, sorted(lines)


@needs_cudf
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.lineno}-{dotted(call.func, NAMES)}")
def test_a_call(call: ast.Call) -> None:
    path = dotted(call.func, NAMES)
    given = len(call.args), [k.arg for k in call.keywords if k.arg]
    if path in MADE:
        assert given == MADE[path][0]
        MADE[path][1](found(path))
    else:
        takes(found(path), *given)


@needs_cudf
def test_every_name_is_there() -> None:
    for node in ast.walk(TREE):
        if isinstance(node, ast.Attribute) and (path := dotted(node, NAMES)):
            found(path)
    for name in NAMES.values():
        found(name)


@needs_cudf
@pytest.mark.parametrize(("owner", "name", "positional"), METHODS)
def test_a_method(owner: str, name: str, positional: int) -> None:
    takes(getattr(found(owner), name), 1 + positional, [])


@needs_cudf
@pytest.mark.parametrize(("owner", "name"), ATTRIBUTES)
def test_an_attribute(owner: str, name: str) -> None:
    assert hasattr(found(owner), name)


@needs_cudf
def test_the_module_is_a_device_frames() -> None:
    from dask_gpurt.backends import cudf_frames, frames

    for name in (n for n in vars(frames.DeviceFrames) if not n.startswith("_") and n != "name"):
        here, there = getattr(cudf_frames.CudfFrames, name), getattr(frames.DeviceFrames, name)
        assert list(inspect.signature(here).parameters) == list(inspect.signature(there).parameters)
