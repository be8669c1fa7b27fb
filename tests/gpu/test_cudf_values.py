"""cuDF's frames leave and come back as they were, and nothing is allocated on the way out. No GPU: see `on_host`.

Skipped where cuDF cannot be imported. (It can without a GPU; see ``ci/gpu.sh``.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("cudf", reason="cuDF is not installed")

import cudf
import rmm.mr

from dask_gpurt.backends import cudf_values
from dask_gpurt.tiers.device.box import BoxState
from dask_gpurt.tiers.device.containers import WithContainers
from dask_gpurt.tiers.device.pinned import BlockPool, SlabTier
from dask_gpurt.tiers.device.space import DeviceSpace
from tests.gpu import on_host
from tests.gpu.on_host import content, lists, plain, text, typed
from tests.tiers.conftest import HostSlabs
from tests.tiers.device.host_rmm import _DEVICES

N = 1000
STRING = np.dtype("object")


def number(data: Any, **more: Any) -> Any:
    return typed(plain(data, **more), data.dtype)


def index() -> Any:
    return cudf.Index._from_column(number(np.arange(N)[::-1].copy()), name="i")


def frame() -> Any:
    """Numbers, nulls, times, text, categories and lists, with an index."""
    codes = (np.arange(N) % 3).astype("u1")
    categories = cudf.Index._from_column(typed(text(["x", "yy", "z"]), STRING))
    columns = {
        "int": number(np.arange(N)),
        "null": number(np.arange(N) * 0.5, valid=[i % 7 > 0 for i in range(N)]),
        "when": number(np.arange(N).astype("M8[ns]")),
        "span": number(np.arange(N).astype("m8[ns]")),
        "flag": number(np.arange(N) % 2 == 0),
        "text": typed(text([f"row {i}" for i in range(N)]), STRING),
        "list": typed(lists([i % 4 for i in range(N)]), cudf.ListDtype("int64")),
    }
    columns["kind"] = typed(plain(codes), cudf.CategoricalDtype(categories, ordered=True))
    return cudf.DataFrame._from_data(columns, index=index())


def series() -> Any:
    return cudf.Series._from_column(typed(text(["a", "bb", ""] * N), STRING), name="s", index=cudf.RangeIndex(3 * N))


def labelled() -> Any:
    two = {i: number(np.arange(N) + i) for i in range(2)}
    labels = pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["up", "down"])
    return cudf.DataFrame._from_data(two, index=cudf.RangeIndex(5, 5 + N), columns=labels)


def empty() -> Any:
    return cudf.DataFrame._from_data({"a": number(np.arange(0))}, index=cudf.RangeIndex(0))


MAKERS = [frame, series, index, labelled, empty]


def refuse(nbytes: int, stream: Any) -> int:
    raise MemoryError(f"{nbytes} bytes were wanted from the pool that is full")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend, on a device where every allocation but its own fails."""
    before = rmm.mr.get_per_device_resource(0)
    rmm.mr.set_per_device_resource(0, rmm.mr.CallbackMemoryResource(refuse, lambda *args: None))
    yield on_host.backend_on_host(monkeypatch, next(_DEVICES))
    rmm.mr.set_per_device_resource(0, before)


def there_and_back(backend: Any, value: Any) -> Any:
    (_, frames), *_ = backend.encode(value)
    pieces = []
    for f in frames:
        if hasattr(f, "copy_to"):
            out = bytearray(f.nbytes)
            f.copy_to([memoryview(out)])
            f.finish()
            pieces.append([memoryview(out)])
        else:
            pieces.append([memoryview(f)])
    return backend.decode_pieces(pieces)


def same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    assert content(got) == content(want)
    if isinstance(want, cudf.DataFrame):
        assert got.columns.equals(want.columns)
        assert list(got.columns.names) == list(want.columns.names)
        for mine, theirs in zip(got.dtypes, want.dtypes, strict=True):
            assert type(mine) is type(theirs)
            if isinstance(
                theirs, cudf.CategoricalDtype
            ):  # categories are compared by `content`: here it takes a kernel
                assert mine.ordered == theirs.ordered
            else:
                assert mine == theirs
    else:
        assert got.dtype == want.dtype
        assert got.name == want.name
    if not isinstance(want, cudf.Index):
        assert type(got.index) is type(want.index)
        assert got.index.name == want.index.name
        assert len(got.index) == len(want.index)


@pytest.mark.parametrize("make", MAKERS)
def test_a_frame_comes_back_as_it_was(make: Any, backend: Any) -> None:
    value = make()
    assert backend.owns(value)
    same(there_and_back(backend, value), value)
    assert backend.refused == 0


@pytest.mark.parametrize("make", MAKERS)
def test_buffers_that_several_objects_share_are_not_copied_on_the_device(make: Any, backend: Any) -> None:
    """cuDF copies such a buffer when its own serialization opens it for writing: there is no memory for that."""
    value = make()
    twin = value.copy(deep=False)
    before = sorted(cudf_values.blocks(value))
    assert before == sorted(cudf_values.blocks(twin))
    same(there_and_back(backend, twin), value)
    assert sorted(cudf_values.blocks(value)) == before
    assert backend.allocated_bytes() >= 0


def test_what_a_frame_takes_is_the_sum_of_its_buffers(backend: Any) -> None:
    value = series()
    assert sum(n for _, n in backend.blocks(value)) == 3 * N + 4 * (3 * N + 1)
    assert sum(n for _, n in backend.blocks(labelled())) == 2 * 8 * N
    assert backend.blocks(value.copy(deep=False)) == backend.blocks(value)


def test_frames_under_the_device_tier(backend: Any) -> None:
    tier = SlabTier(BlockPool(HostSlabs(), limit_bytes=None, block_bytes=1 << 12, slab_bytes=1 << 16))
    space = DeviceSpace(WithContainers(backend), [tier], limit_bytes=None)
    boxes = [space.put(i, make()) for i, make in enumerate(MAKERS)]
    split = space.put("split", {0: frame(), 1: (series(), None)})
    assert space.spill(1 << 40) > 0
    assert space.copies.unspillable == 0, space.copies.last_error
    for box, make in zip(boxes, MAKERS, strict=True):
        assert box.state is BoxState.BELOW
        same(box.get(), make())
    got = split.get()
    same(got[0], frame())
    same(got[1][0], series())
    space.validate()


def views() -> list[Any]:
    """Few rows of large buffers."""
    return [
        plain(np.arange(N), offset=10, size=20),
        plain(np.arange(N), size=20),
        text(["word"] * N, size=20),
        text(["word"] * N, offset=3),
    ]


def test_views_are_packed_and_whole_columns_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [cudf_values._is_view(column) for column in views()] == [True] * 4
    whole = [plain(np.arange(N)), plain(np.arange(N).astype("u1")), text(["word"] * N), lists([1, 2, 3]), text([])]
    assert not any(map(cudf_values._is_view, whole))
    packed: list[Any] = []

    class Packed:
        metadata = b"of the table"

        def __init__(self, columns: Any) -> None:
            packed.append(columns)

    monkeypatch.setattr(cudf_values, "PackedTable", Packed)
    value = cudf.Series._from_column(typed(views()[0], np.dtype("i8")), index=cudf.RangeIndex(20))
    (_, body, _), frames = cudf_values.pack(value)
    assert body == b"of the table"
    assert [type(f) for f in frames] == [Packed]
    assert len(packed[0]) == 1


def test_what_would_not_come_back_is_refused() -> None:
    value = labelled()
    value.attrs["unit"] = "m"
    with pytest.raises(cudf_values.Refused, match="attributes"):
        cudf_values.pack(value)


def test_an_index_without_memory_is_no_device_value(backend: Any) -> None:
    assert not backend.owns(cudf.RangeIndex(10))
    assert not backend.owns(cudf.CategoricalDtype())


def test_rows_with_several_levels_count_and_are_left_to_cudf(backend: Any) -> None:
    levels = cudf.MultiIndex._from_data({0: number(np.arange(N)), 1: number(np.arange(N) * 0.5)})
    assert backend.owns(levels)
    assert sum(n for _, n in backend.blocks(levels)) == 16 * N  # no level was computed
    with pytest.raises(cudf_values.Refused, match="several levels"):
        cudf_values.pack(levels)
