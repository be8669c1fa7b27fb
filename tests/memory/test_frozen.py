"""What a process has before its first task is kept out of collections, and comes back."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, Worker

import dask_gpurt
from dask_gpurt.memory import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator


class Owner:
    """Stands for a server: something that can be referred to weakly."""


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.unfreeze()  # see tests/conftest.py
    monkeypatch.setattr(frozen, "_rss", lambda: 0)
    yield
    gc.unfreeze()
    frozen._owners.clear()


def test_the_last_owner_that_leaves_thaws() -> None:
    first: Any = Owner()
    second: Any = Owner()
    frozen.freeze(first, 0)
    assert gc.get_freeze_count() > 10_000
    frozen.freeze(second, 7)  # the process is frozen: its tasks are not
    frozen.thaw(first)
    frozen.thaw(first)
    assert gc.get_freeze_count() > 10_000
    frozen.thaw(second)
    assert gc.get_freeze_count() == 0


def test_what_dies_after_it_is_collected() -> None:
    owner: Any = Owner()
    frozen.freeze(owner, 0)
    seen = weakref.ref(Cycle())
    gc.collect()
    assert seen() is None


def test_what_dies_while_frozen_is_collected_after_thaw() -> None:
    owner: Any = Owner()
    before = Cycle()
    seen = weakref.ref(before)
    frozen.freeze(owner, 0)
    del before
    gc.collect()
    assert seen() is not None
    frozen.thaw(owner)
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("why", ["tasks", "large", "off", "frozen by somebody"])
def test_left_alone(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner: Any = Owner()
    if why == "large":
        monkeypatch.setattr(frozen, "_rss", lambda: frozen.SMALL_BYTES + 1)
    elif why == "off":
        monkeypatch.setattr(gc, "isenabled", lambda: False)
    elif why == "frozen by somebody":
        gc.freeze()
    count = gc.get_freeze_count()
    frozen.freeze(owner, 1 if why == "tasks" else 0)
    assert gc.get_freeze_count() == count
    frozen.thaw(owner)
    assert gc.get_freeze_count() == count


def _count(dask_worker: Worker) -> int:
    return gc.get_freeze_count()


@pytest.mark.cluster
def test_on_a_cluster() -> None:
    """Workers are frozen before they work; one to which we come when it has tasks is not; a detach thaws."""
    with (
        dask_gpurt.local_cluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        assert all(count > 50_000 for count in client.run(_count).values())
        assert gc.get_freeze_count() > 50_000
        dask_gpurt.detach(client)
        assert set(client.run(_count).values()) == {0}
        assert gc.get_freeze_count() == 0
        held = client.submit(Cycle, pure=False)
        held.result()
        dask_gpurt.attach(client)
        assert set(client.run(_count).values()) == {0}
        assert gc.get_freeze_count() == 0
        del held
    assert gc.get_freeze_count() == 0


@pytest.mark.cluster
def test_nothing_stays_frozen_after_a_cluster_of_threads() -> None:
    with (
        dask_gpurt.local_cluster(n_workers=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        assert client.submit(sum, [1, 2]).result() == 3
        assert gc.get_freeze_count() > 50_000
    assert gc.get_freeze_count() == 0
