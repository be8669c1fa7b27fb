"""Public functions with wrong arguments: refused before any work, in words, and nothing is replaced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client

import dask_gpurt
from dask_gpurt.cli.base import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        dask_gpurt.local_cluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("made", [lambda path, c: dask_gpurt.record(c, path), dask_gpurt.report])
def test_only_a_file_is_replaced(made: Callable[[Any, Client], Any], client: Client, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FileExistsError, match="which is a device, a socket or a pipe"):
        made(str(tmp_path / "pipe"), client)
    with pytest.raises(IsADirectoryError, match="Remedy: the name of a file in it"):
        made(tmp_path / "folder", client)
    with pytest.raises(ValueError, match="the path is ''"):
        made("", client)
    assert sorted(os.listdir(tmp_path)) == before
    with made(tmp_path / "file", client):
        assert client.submit(len, "abc").result() == 3
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_bytes() != b"old"


def test_an_address_is_no_path(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="must be where the HTML file goes"):
        dask_gpurt.report(client.scheduler.address)
    with pytest.raises(TypeError, match="The client comes first"):
        dask_gpurt.record("run.trace", client)  # type: ignore[arg-type]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("on", ["off", 0, None])
def test_safe_mode_takes_no_words(on: Any, client: Client) -> None:
    with pytest.raises(TypeError, match="must be True or False"):
        dask_gpurt.safe(client, on)
    assert not dask_gpurt.safe(client, False).since


def test_the_client_comes_first(client: Client) -> None:
    for ask in (dask_gpurt.explain, dask_gpurt.where):
        with pytest.raises(TypeError, match=r"must be a key, .* The client comes first"):
            ask("x", client)
        with pytest.raises(TypeError, match="must be a key, a future, a collection"):
            ask(client, {"x": 1})
    with pytest.raises(TypeError, match=r"a list of addresses or names\. The client comes first"):
        dask_gpurt.hold(["x"], client)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of addresses or names"):
        dask_gpurt.hold(client, next(iter(client.scheduler_info()["workers"])))


def test_workers_have_numbers_for_names(client: Client) -> None:
    with pytest.raises(ValueError, match=r"no worker 7\. Must be an address or a name"):
        dask_gpurt.hold(client, [7])
    assert len(dask_gpurt.hold(client, [0]).held) == 1
    assert not dask_gpurt.release(client, [0]).held


@pytest.mark.parametrize("timeout", ["5s", None, 0, -1, float("nan"), float("inf"), True])
def test_a_timeout_is_seconds(timeout: Any, client: Client) -> None:
    with pytest.raises(ValueError, match=r"timeout is .*, must be a number of seconds above 0"):
        dask_gpurt.status(client, timeout=timeout)
    with pytest.raises(ValueError, match="timeout is"):
        dask_gpurt.explain(client, "x", timeout=timeout)
    with pytest.raises(ValueError, match="timeout is"):
        dask_gpurt.report("x.html", client, timeout=timeout)
    with pytest.raises(ValueError, match="timeout is"):
        dask_gpurt.record(client, "x.trace", timeout=timeout)


def test_a_tuple_that_is_no_key_is_looked_for_as_text() -> None:
    typed = {"('x', 0)": ("x", 0), "('x', None)": "('x', None)", "('x', [1])": "('x', [1])", "(x": "(x", "x": "x"}
    assert {text: key_of(text) for text in typed} == typed
