"""What distributed relies on in ``worker.data``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dask_gpurt.testing import same

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping


def check_mapping(make: Callable[[], MutableMapping[Any, Any]]) -> None:
    """What distributed relies on in ``worker.data``. A plain dict passes.

    Parameters
    ----------
    make
        Returns an empty mapping. Called on a running event loop if the mapping needs one.
    """
    data = make()
    assert len(data) == 0
    assert not data
    assert list(data) == []
    _absent(data, "absent")
    with pytest.raises(KeyError):
        del data["absent"]
    assert "absent" not in data
    assert data.get("absent", 7) == 7

    keys: list[Any] = ["a", ("b", 0), ("b", 1), b"c", 5, "with/slash \u00e9"]
    values: list[Any] = [1, None, "x" * 10_000, np.arange(5000.0), {"k": [1, 2]}, (np.ones(3), "y")]
    for key, value in zip(keys, values, strict=True):
        data[key] = value
    assert len(data) == len(keys)
    assert set(data) == set(keys) == set(data.keys())
    for key, value in zip(keys, values, strict=True):
        assert key in data
        same(data[key], value)
        same(data[key], value)  # reading takes nothing away
    same(dict(data.items())["a"], 1)

    data["a"] = "new"
    assert data["a"] == "new"
    assert len(data) == len(keys)
    for key in list(data):  # deleting while a copy of the keys is walked
        del data[key]
        assert key not in data
        _absent(data, key)
    assert len(data) == 0
    data["again"] = 1
    data.clear()
    assert len(data) == 0
    data["p"] = 3
    data.update({"q": 4})
    assert dict(data) == {"p": 3, "q": 4}


def _absent(data: MutableMapping[Any, Any], key: Any) -> None:
    with pytest.raises(KeyError):
        data[key]
