"""`DeviceBackend`: what a kind of device has to offer the device tier.

`dask_gpurt.backends.device_values.CudaBackend` implements it for the libraries of CUDA. Tests have one whose values lie
in ordinary memory that RMM allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from dask_gpurt.tiers.storage.handle import Group


class DeviceFrame(Protocol):
    """A frame whose bytes are on a device."""

    @property
    def nbytes(self) -> int:
        """Bytes of the frame."""

    def copy_to(self, targets: Sequence[memoryview]) -> None:
        """Begin to fill `targets`, in their order, which together are as long as the frame."""

    def finish(self) -> None:
        """Return when everything that `copy_to` began has ended; also after it failed."""


class DeviceBackend(Protocol):
    """A kind of device; also the codec of its values (`storage.handle.Codec`)."""

    def owns(self, value: object) -> bool:
        """Whether this is a value in device memory. Called for every result of a task: it must cost next to nothing."""

    def blocks(self, value: object) -> Sequence[tuple[Hashable, int]]:
        """The allocations that a value holds, each with its bytes: views of one buffer name the same.

        Runs no kernel and waits for none.
        """

    def outside(self, value: object) -> bool:
        """Whether its memory came past the allocator whose `allocated_bytes` counts."""

    def encode(self, value: object, parts: Sequence[int] | None = None) -> list[Group]:
        """Frames, those in device memory as `DeviceFrame`. Takes no memory from the allocator that has failed."""

    def decode(self, frames: list[memoryview]) -> Any:
        """The value, on the device again."""

    def decode_pieces(self, frames: list[list[memoryview]]) -> Any:
        """The same, from frames that lie in pieces."""

    def fence(self) -> None:
        """Return when everything that was begun on the device is done."""

    def allocated_bytes(self) -> int:
        """Bytes of device memory in use, by the allocator's own count."""
