"""Which workers a task that reads device values may run on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.placement.tables.devices import Devices, reads_device_values


def worker(address: str, said: int | None) -> Any:
    metrics = {} if said is None else {"gpurt": {"device_possible": said}}
    return SimpleNamespace(address=address, metrics=metrics)


def task(*types: str | None) -> Any:
    return SimpleNamespace(dependencies=[SimpleNamespace(type=name) for name in types])


GPU, CPU, SILENT = worker("gpu", 1), worker("cpu", 0), worker("silent", None)
FRAME = task("pandas.core.frame.DataFrame", "cudf.core.dataframe.DataFrame")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cudf.core.dataframe.DataFrame", True),
        ("cupy.ndarray", True),
        ("pandas.core.frame.DataFrame", False),
        ("torch.Tensor", False),  # of either
        ("cudfoo.Frame", False),
        (None, False),
    ],
)
def test_types(name: str | None, expected: bool) -> None:
    assert reads_device_values(task(name)) is expected
    assert not reads_device_values(task())


def test_only_workers_that_said_that_they_have_none_are_left_out() -> None:
    devices = Devices()
    every = [GPU, CPU, SILENT]
    for ws in every:
        devices.look(ws)
        devices.look(ws)
    assert devices.mixed
    assert devices.able(FRAME, every) == [GPU, SILENT]
    assert devices.able(task("numpy.ndarray"), every) is every
    assert devices.able(FRAME, [CPU]) == [CPU]  # Dask reports what follows
    assert (devices.without, devices.left_out) == (1, 2)
    devices.removed("cpu")
    devices.removed("cpu")
    assert not devices.mixed
    assert devices.able(FRAME, every) is every


@pytest.mark.parametrize("kind", [GPU, CPU, SILENT])
def test_a_cluster_of_one_kind_is_left_as_it_is(kind: Any) -> None:
    devices = Devices()
    devices.look(kind)
    assert not devices.mixed
    assert devices.able(FRAME, [kind]) == [kind]
