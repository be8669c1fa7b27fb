"""Lists, tuples and dicts of device values: known as such, sized once, spilled and brought back whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dask_gpurt.tiers.device.box import BoxState
from dask_gpurt.tiers.device.containers import LOOK, WithContainers

pytest.importorskip("rmm")

from tests.tiers.device.host_rmm import Elsewhere, HostRmmBackend, pattern
from tests.tiers.device.test_space import KB, Rig

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 100 * KB


class ContainerRig(Rig):
    """A rig that knows containers."""

    def __init__(self, tmp_path: Path, limit: int, **more: Any) -> None:
        super().__init__(tmp_path, limit, **more)
        self.space.backend = self.space.copies.backend = WithContainers(self.backend)


def same(value: Any, i: int) -> bool:
    return bool((value.array() == pattern(i, value.nbytes)).all())


@pytest.mark.parametrize("blocks", [None, 0], ids=["blocks", "disk"])
def test_the_outputs_of_a_split_leave_and_come_back(tmp_path: Path, blocks: int | None) -> None:
    rig = ContainerRig(tmp_path, 5 * SIZE, blocks=blocks)
    make = rig.backend.make
    split = {0: make(0, SIZE), 7: make(7, SIZE), "host": np.arange(10), "n": (make(3, SIZE), "text", None), "l": []}
    box = rig.space.put("split", split)
    assert box.nbytes == rig.space.device_bytes == 3 * SIZE
    del split
    other = make(9, 4 * SIZE)  # the split has to leave
    assert box.state is BoxState.BELOW
    assert rig.backend.allocated_bytes() == 4 * SIZE
    del other
    got = box.get()
    assert list(got) == [0, 7, "host", "n", "l"]
    assert same(got[0], 0)
    assert same(got[7], 7)
    assert same(got["n"][0], 3)
    assert got["n"][1:] == ("text", None)
    assert got["l"] == []
    assert (got["host"] == np.arange(10)).all()
    rig.space.validate()
    assert rig.space.copies.unspillable == 0


@pytest.mark.parametrize("blocks", [None, 0], ids=["blocks", "disk"])
def test_a_host_member_outlives_the_copy_that_it_came_from(tmp_path: Path, blocks: int | None) -> None:
    """It was a view of the blocks, so the next value that left the device wrote over it."""
    rig = ContainerRig(tmp_path, 5 * SIZE, blocks=blocks)
    box = rig.space.put("a", [rig.backend.make(0, SIZE), np.arange(1000)])
    rig.space.spill(1)
    host = box.get()[1]  # as a task does that returns it
    host[0] = 7  # nor is it read-only
    box.space.remove(box)
    rig.space.put("b", [rig.backend.make(1, SIZE), np.full(1000, -1)])
    rig.space.spill(1)
    assert host[0] == 7
    assert (host[1:] == np.arange(1, 1000)).all()


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: (v, 1), lambda v: {"a": v}, lambda v: [(v,)]])
def test_what_is_looked_into(tmp_path: Path, wrap: Any) -> None:
    rig = ContainerRig(tmp_path, 5 * SIZE)
    backend = rig.space.backend
    value = wrap(rig.backend.make(1, SIZE))
    assert backend.owns(value)
    assert [n for _, n in backend.blocks(value)] == [SIZE]
    assert not backend.outside(value)
    box = rig.space.put(0, value)
    kind = repr(type(value))
    del value
    assert rig.space.spill(1) == SIZE
    assert box.state is BoxState.BELOW
    assert repr(type(box.get())) == kind


def test_what_is_not(tmp_path: Path) -> None:
    backend = WithContainers(HostRmmBackend(10 * SIZE))
    device = backend.inner.make(1, SIZE)

    class Mine(dict[Any, Any]):
        pass

    for value in ([], {}, (), [1, 2], {"a": [1]}, [None] * LOOK + [device], Mine(a=device), [[[device]]], "text"):
        assert not backend.owns(value), value


def test_a_member_that_is_there_twice_is_copied_once(tmp_path: Path) -> None:
    rig = ContainerRig(tmp_path, 5 * SIZE)
    member = rig.backend.make(4, SIZE)
    box = rig.space.put(0, [member, (member, member.view())])
    assert box.nbytes == SIZE
    del member
    rig.space.spill(1)
    assert rig.slabs.metrics["written_bytes"] < 2.1 * SIZE  # the view is an object of its own
    first, (second, view) = box.get()
    assert first is second
    assert same(view, 4)


def test_a_container_is_outside_where_all_of_it_is() -> None:
    backend = WithContainers(HostRmmBackend(10 * SIZE))
    elsewhere, inside = Elsewhere(pattern(0, SIZE)), backend.inner.make(1, SIZE)
    assert backend.outside([elsewhere])
    assert not backend.outside([elsewhere, inside])


class _Panic(BaseException):
    """As what an extension in Rust raises when it panics."""


class _Panics:
    """A member in host memory."""

    def __init__(self, *, writing: bool) -> None:
        self.writing = writing

    def __reduce__(self) -> Any:
        if self.writing:
            raise _Panic("in Rust")
        return _panic, ()


def _panic() -> None:
    raise _Panic("in Rust")


@pytest.mark.parametrize("blocks", [None, 0], ids=["blocks", "disk"])
def test_a_member_that_panics_when_it_is_read_raises_what_a_task_can_end_with(
    tmp_path: Path, blocks: int | None
) -> None:
    rig = ContainerRig(tmp_path, 5 * SIZE, blocks=blocks)
    box = rig.space.put("a", [rig.backend.make(0, SIZE), _Panics(writing=False)])
    assert rig.space.spill(1) == SIZE
    with pytest.raises(RuntimeError, match="cannot be unpickled: _Panic: in Rust"):
        box.get()
    assert box.state is BoxState.BELOW


def test_a_member_that_panics_when_it_is_written_stays_and_others_leave(tmp_path: Path) -> None:
    rig = ContainerRig(tmp_path, 5 * SIZE)
    stays = rig.space.put("a", [rig.backend.make(0, SIZE), _Panics(writing=True)])
    leaves = rig.space.put("b", [rig.backend.make(1, SIZE)])
    assert rig.space.spill(2 * SIZE) == SIZE
    assert (stays.state, leaves.state) == (BoxState.DEVICE, BoxState.BELOW)
    assert stays.unspillable
    assert "_Panic: in Rust" in rig.space.copies.last_error
