"""Tensors in the device tier, by a stand-in for torch: what is kept of which, and what is waited for. No GPU, no torch.

It is made up, so it proves nothing of torch: `tests.gpu.unproven` leaves it out.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("rmm")
pytest.importorskip("cuda.bindings")

from dask_gpurt.backends.device_values import CudaBackend
from dask_gpurt.backends.rmm_stack import DeviceAllocator
from tests.backends.test_driver_calls import N, backend_of, copied

if TYPE_CHECKING:
    from tests.backends.host_driver import HostDriver


class Tensor:
    """What `CudaBackend` asks of torch's, over ordinary memory."""

    is_cuda, requires_grad, is_quantized, layout, dtype = True, False, False, "strided", "torch.uint8"
    device = SimpleNamespace(index=0)

    def __init__(self, data: np.ndarray[Any, Any], then: Tensor | None = None, marked: Tensor | None = None) -> None:
        self.data, self.shape, self._then, self._marked = data, data.shape, then, marked

    def resolve_conj(self) -> Tensor:
        return self._marked or self

    def resolve_neg(self) -> Tensor:
        return self

    def contiguous(self) -> Tensor:
        return self._then or self

    def data_ptr(self) -> int:
        return self.data.ctypes.data

    def numel(self) -> int:
        return self.data.size

    def element_size(self) -> int:
        return self.data.itemsize

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.data_ptr(), nbytes=lambda: self.data.nbytes)


Tensor.__module__ = "torch"


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = SimpleNamespace(Tensor=Tensor, strided="strided")
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.mark.parametrize("by", ["then", "marked"])
def test_a_tensor_is_made_dense_before_it_is_copied(driver: HostDriver, torch: Any, by: str) -> None:
    """By kernels on a stream of torch. Conjugation is a mark beside the memory, which `contiguous` keeps."""
    dense = Tensor(np.zeros(N, "u1"))
    value = Tensor(np.zeros(N, "u1"), **{by: dense})
    driver.later(3, lambda: ctypes.memset(dense.data_ptr(), 7, N) and None)
    ((_, (_, frame)),) = backend_of(driver).encode(value)
    assert copied([frame]) == [b"\7" * N]


def test_tensors_with_more_to_them_than_bytes_stay_what_they_are(driver: HostDriver, torch: Any) -> None:
    class Parameter(Tensor):
        """One of a model."""

    Parameter.__module__ = "torch.nn.parameter"
    allocator = DeviceAllocator(lambda nbytes: False, 1 << 24, pool=None, device=0)
    backend = CudaBackend(allocator)

    def one(kind: type[Tensor] = Tensor, **attributes: Any) -> Tensor:
        out = kind(np.zeros(N, "u1"))
        out.__dict__.update(attributes)
        return out

    assert backend.owns(one())
    assert not backend.owns(one(Parameter))
    assert not backend.owns(one(layout="sparse_coo"))
    assert not backend.owns(one(is_quantized=True))
    assert not backend.owns(one(is_cuda=False))
    assert not backend.owns(one(device=SimpleNamespace(index=1)))  # it would come back on another device
