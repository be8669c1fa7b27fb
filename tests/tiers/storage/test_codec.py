"""What comes back from a lower tier is what Dask's own spilling would give back: its type, its flags, its size."""

from __future__ import annotations

import gc
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed.protocol import deserialize_bytes, serialize_bytelist

from dask_gpurt.tiers.storage import codec
from dask_gpurt.tiers.storage.codec import PickleCodec, flat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def written(value: object) -> list[memoryview]:
    return [memoryview(bytearray(flat(f))) for _, group in PickleCodec().encode(value) for f in group]


def again(value: object) -> Any:
    return PickleCodec().decode(written(value))


def by_stock(value: object) -> Any:
    return deserialize_bytes(b"".join(serialize_bytelist(value, on_error="raise")))


@pytest.mark.parametrize(
    "view",
    [
        memoryview(b"x" * 100_000),
        memoryview(bytearray(80_000)).cast("d"),
        np.arange(120).reshape(4, 30).data,
        np.asfortranarray(np.arange(120).reshape(4, 30)).data,
        np.arange(24.0).reshape(2, 3, 4).transpose(2, 1, 0).data,
        np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2).data,
        np.arange(120).data[::2],
        memoryview(b""),
    ],
    ids=("bytes", "cast", "two-dimensional", "columns first", "reversed", "turned", "steps", "empty"),
)
@pytest.mark.parametrize(
    "wrap",
    [lambda v: v, lambda v: [1, v], lambda v: {"a": (v,)}, lambda v: {"a": [[[[v]]]]}],
    ids=("alone", "list", "dict", "deep"),
)
def test_a_memoryview_does_not_become_bytes(view: memoryview, wrap: Callable[[Any], Any]) -> None:
    got = again(wrap(view))
    while not isinstance(got, (memoryview, bytes)):
        got = got[-1] if isinstance(got, (list, tuple)) else got["a"]
    assert type(got) is memoryview
    assert (got.format, got.shape, got.tolist()) == (view.format, view.shape, view.tolist())


@pytest.mark.parametrize(
    "array",
    [
        np.ma.masked_array(np.arange(50), np.arange(50) % 3 == 0),
        np.arange(50).reshape(5, 10).view(np.matrix),
        np.zeros(50, "i4,f8").view(np.recarray),
    ],
    ids=lambda array: type(array).__name__,
)
def test_an_array_of_a_subclass_that_is_read_only_stays_so(array: np.ndarray[Any, Any]) -> None:
    array.flags.writeable = False
    got = again(array)
    assert type(got) is type(array)
    assert not got.flags.writeable
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v]], ids=("alone", "list"))
def test_a_mapped_file_is_an_array_as_in_stock(tmp_path: Path, mode: Any, wrap: Callable[[Any], Any]) -> None:
    np.arange(10_000).tofile(tmp_path / "file")
    mapped = np.memmap(tmp_path / "file", "i8", mode)
    frames = [f for _, group in PickleCodec().encode(wrap(mapped)) for f in group]
    assert any(np.shares_memory(np.frombuffer(flat(f), "u1"), mapped) for f in frames), "it was copied"
    got, want = again(wrap(mapped)), by_stock(wrap(mapped))
    if isinstance(got, list):
        (got,), (want,) = got, want
    assert type(got) is type(want) is np.ndarray
    assert got.flags.writeable == want.flags.writeable == (mode != "r")
    np.testing.assert_array_equal(got, mapped)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (0, v), lambda v: {"a": {"b": v}}], ids=("l", "t", "d"))
def test_a_broadcast_array_in_a_collection_is_not_blown_up(wrap: Callable[[Any], Any]) -> None:
    big = np.broadcast_to(np.ones(3), (100_000, 3))
    assert sum(f.nbytes for f in written(wrap(big))) < 10_000
    got = again(wrap(big))
    assert type(got) is type(wrap(big))
    while not isinstance(got, np.ndarray):
        got = got["a"]["b"] if isinstance(got, dict) else got[-1]
    assert not got.flags.writeable
    np.testing.assert_array_equal(got, big)


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v]], ids=("alone", "list"))
def test_a_masked_array_comes_back_as_in_stock(wrap: Callable[[Any], Any]) -> None:
    """Pickle makes a mask where there was none, copies the values, and writes all rows of a broadcast array."""
    plain = np.ma.masked_array(np.arange(10_000.0), fill_value=7)
    masked = np.ma.masked_array(np.arange(10_000), np.arange(10_000) % 3 == 0)
    broadcast = np.broadcast_to(plain[:3], (100_000, 3), subok=True)
    for array in (plain, masked, broadcast):
        frames = [f for _, group in PickleCodec().encode(wrap(array)) for f in group]
        assert any(np.shares_memory(np.frombuffer(flat(f), "u1"), array.data) for f in frames), "it was copied"
        assert sum(flat(f).nbytes for f in frames) < 100_000
        got, want = again(wrap(array)), by_stock(wrap(array))
        if isinstance(got, list):
            (got,), (want,) = got, want
        assert type(got) is type(want) is np.ma.MaskedArray
        assert (got.mask is np.ma.nomask) == (want.mask is np.ma.nomask) == (array.mask is np.ma.nomask)
        assert got.fill_value == want.fill_value == array.fill_value
        np.testing.assert_array_equal(got.filled(), array.filled())


def test_what_is_below_a_mask_keeps_its_type() -> None:
    """The family would make an array of it."""
    got = again(np.ma.masked_array(np.array([[1, 2]]).view(np.matrix), [[True, False]]))
    assert type(got.data) is np.matrix


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v]], ids=("alone", "list"))
def test_a_slice_of_a_tensor_is_written_alone_and_keeps_its_gradient(wrap: Callable[[Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(100_000.0)
    assert sum(f.nbytes for f in written(wrap(whole[:10]))) < 10_000, "all that it is a slice of was written"
    frames = [f for _, group in PickleCodec().encode(wrap(whole)) for f in group]
    assert any(np.shares_memory(np.frombuffer(flat(f), "u1"), whole.numpy()) for f in frames), "it was copied"
    leaf = torch.ones(3, requires_grad=True)
    (leaf * 2).sum().backward()
    got = again(wrap(leaf))
    got = got[0] if isinstance(got, list) else got
    assert got.requires_grad
    assert got.grad.tolist() == [2, 2, 2]
    for other in (torch.ones(1).expand(1000, 1000), torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.bfloat16)):
        got = again(wrap(other))
        got = got[0] if isinstance(got, list) else got
        assert (got.layout, got.dtype, got.shape) == (other.layout, other.dtype, other.shape)
        assert bool((got.to_dense() == other.to_dense()).all())
    assert sum(f.nbytes for f in written(wrap(torch.ones(1).expand(1000, 1000)))) < 10_000


def test_a_tensor_goes_by_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where PyTorch is not installed: a type of its name."""
    torch = types.ModuleType("torch")
    torch.strided = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)

    class Tensor:
        def __init__(self, layout: object, *strides: int) -> None:
            self.layout, self.strides = layout, strides

        def stride(self) -> tuple[int, ...]:
            return self.strides

    monkeypatch.setattr(Tensor, "__module__", "torch")
    assert codec._better_by_family(Tensor(torch.strided, 1))
    assert codec._better_by_family([Tensor(torch.strided, 1)])
    assert not codec._better_by_family(Tensor(torch.strided, 0, 1)), "it would be blown up"
    assert not codec._better_by_family(Tensor("sparse")), "the family does not know it"


def test_frames_in_a_cycle_of_garbage_do_not_crash_the_process() -> None:
    """CPython does where a view of a view is collected with what it is a view of."""
    for view in (np.arange(10.0).data, np.asfortranarray(np.ones((3, 4))).data, np.zeros((0, 3)).data):
        ring: list[Any] = [flat(view)]
        assert ring[0].tobytes() == view.tobytes("A")
        assert not isinstance(ring[0].obj, memoryview)
        ring.append(ring)
    del ring, view
    gc.collect()


def test_a_list_that_holds_itself_is_still_written() -> None:
    ring: list[Any] = [memoryview(b"abc")]
    ring.append(ring)
    got = again(ring)
    assert got[1] is got
    assert bytes(got[0]) == b"abc"


def test_a_table_without_columns_keeps_its_rows() -> None:
    """Pickle forgets them; Dask's own spilling does not."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"a": range(10)}).select([])
    batch = pa.record_batch({"a": range(10)}).select([])
    for value in (table, table.slice(2, 3), batch):
        assert again(value).num_rows == by_stock(value).num_rows == value.num_rows
        assert again([value])[0].num_rows == value.num_rows
    assert again(pa.table({})).num_rows == 0
