"""Private names of distributed that the take-over uses: all of them are looked for at installation."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import distributed.scheduler
import pytest
from distributed import Client, Scheduler
from distributed.scheduler import TaskState, WorkerState
from distributed.stealing import WorkStealing

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.placement.takeover import seam
from dask_gpurt.placement.takeover.fusion import Fusion

if TYPE_CHECKING:
    from collections.abc import Iterator

TAKEOVER = Path(seam.__file__).parent
#: attributes that begin with an underscore and are public: of named tuples
PUBLIC = {"_replace", "_make", "_fields", "_asdict"}
#: where a graph is made, and where its tasks are
FUSION = [(distributed.scheduler, "_materialize_graph"), (Scheduler, "_generate_taskstates")]
NAMES = [
    *((Scheduler, name) for name in (*seam.SIGNATURES, "_TRANSITIONS_TABLE")),
    *((WorkStealing, name) for name in seam.STEALING),
    *((owner, name) for owner, names in seam.ATTRIBUTES.items() for name in names),
]


def private_names(path: Path) -> Iterator[str]:
    """Attributes of others and modules of distributed or dask that begin with an underscore."""
    tree = ast.parse(path.read_text())
    #: what the module itself, or one beside it, defines on its own classes
    own = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr not in own | PUBLIC:
                yield f"{path.name}:{node.lineno}: .{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("distributed", "dask"):
            for name in (*(node.module or "").split("."), *(a.name for a in node.names)):
                if name.startswith("_"):
                    yield f"{path.name}:{node.lineno}: import {name}"


@pytest.mark.parametrize(
    "text", ["x = ws._network_occ", "from distributed.shuffle._core import x", "ts._queueable = 1"]
)
def test_a_private_name_is_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(text)
    assert len(list(private_names(path))) == 1


def test_all_private_names_of_the_take_over_are_in_its_tables() -> None:
    known = {name for _, name in (*NAMES, *FUSION)}
    used = {found.rsplit(".", 1)[1] for p in TAKEOVER.glob("*.py") for found in private_names(p) if ": ." in found}
    assert used - known <= {"_active"}, "of model.wrapped"


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[f"{o.__name__}.{n}" for o, n in NAMES])
def test_without_one_of_them_nothing_is_installed(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = next(c for c in owner.__mro__ if name in vars(c))
    monkeypatch.delattr(where, name)
    scheduler = object.__new__(Scheduler)
    with pytest.raises(SeamMismatch, match=name):
        seam.Seam(scheduler).check()


@pytest.mark.parametrize(("owner", "name"), FUSION)
def test_without_one_of_them_nothing_is_fused(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name, raising=False)
    with pytest.raises(SeamMismatch, match=name):
        Fusion(seam.Seam(object.__new__(Scheduler)), lambda: True)


def test_with_all_of_them_it_is() -> None:
    seam.Seam(object.__new__(Scheduler)).check()
    assert {Client, TaskState, WorkerState} == set(seam.ATTRIBUTES)
