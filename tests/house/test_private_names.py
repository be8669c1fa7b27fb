"""Private names of distributed, dask and bokeh are used in the seams only, which look them up when they install."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parents[2] / "dask_gpurt"
LIBRARIES = {"distributed", "dask", "bokeh"}
#: the one place of each part
SEAMS = (
    "placement/takeover/",
    "tiers/worker/seam.py",
    "tiers/worker/spill_buffer.py",
    "tiers/read_cache/seam.py",  # the functions by which dask.dataframe reads, and what it wraps fragments in
    "shuffle/seam.py",
    "observe/seam.py",
    "extension/seam.py",
    "simulate/seam.py",
    "planning/seam.py",
    "planning/surroundings.py",  # pandas' options, by which types of results differ
    "planning/calls.py",  # operands of dask.dataframe's expressions
    "planning/files.py",  # operands, as above
    "planning/meta.py",  # what a frame of pandas is made of
    "planning/named.py",  # operands, as above
    "bench/seam.py",  # stock's shuffle, counted; dask.dataframe's empty frames
    "tiers/engine/buffer_roots.py",  # of pandas, inspected as it goes
    "backends/cudf_values.py",  # of cuDF, in its table; tests/gpu/test_names.py compares it with the wheels
)
#: names with an underscore that are public, or of the standard library
PUBLIC = {"_make", "_replace", "_asdict", "_fields", "_get_running_loop", "_set_running_loop", "_run"}


#: builtins that take the name of an attribute
ACCESS = {"getattr", "setattr", "hasattr", "delattr"}
#: what we put on objects of theirs begins so
OURS = "_gpurt"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", OURS))


def _own_names(tree: ast.AST) -> Iterator[str]:
    """Names with an underscore that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _used(tree: ast.AST) -> Iterator[str]:
    """Private names that a file takes from a library: imported, or as an attribute of something that is not its own."""
    own = {name for name in _own_names(tree) if _is_private(name)} | PUBLIC
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if _is_library(a.name) and any(map(_is_private, a.name.split("."))))
        elif isinstance(node, ast.ImportFrom) and node.module is not None and _is_library(node.module):
            names = (f"{node.module}.{a.name}" for a in node.names)
            yield from (name for name in names if any(map(_is_private, name.split("."))))
        elif isinstance(node, ast.Attribute):
            if _is_private(node.attr) and not _is_self(node.value) and node.attr not in own:
                yield f".{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ACCESS:
            for name in node.args[1:2]:
                if isinstance(name, ast.Constant) and _is_private(str(name.value)):
                    yield f".{name.value}"


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def offenders(package: Path) -> dict[str, list[str]]:
    """File -> the private names that it uses, for files that are no seam."""
    out = {}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        if not place.startswith(SEAMS):
            out[place] = sorted(set(_used(ast.parse(path.read_text()))))
    return {place: names for place, names in out.items() if names}


def test_private_names_are_in_the_seams() -> None:
    assert offenders(PACKAGE) == {}


def test_the_seams_exist() -> None:
    for place in SEAMS:
        assert (PACKAGE / place).exists(), place


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from dask._task_spec import Task", "dask._task_spec.Task"),
        ("import distributed._version", "distributed._version"),
        ("from distributed.worker import _deserialize", "distributed.worker._deserialize"),
        ("def f(scheduler):\n    return scheduler._create_task()", "._create_task"),
        ("def f(ts):\n    return getattr(ts, '_queueable')", "._queueable"),
    ],
)
def test_a_private_name_is_found(text: str, name: str, tmp_path: Path) -> None:
    for place in ("observe/x.py", "simulate/seam.py"):
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).write_text(text)
    assert offenders(tmp_path) == {"observe/x.py": [name]}
