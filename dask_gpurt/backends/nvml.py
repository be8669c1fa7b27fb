"""NVIDIA's management library: `look` takes a `Snapshot` of the GPUs of this machine, `load` says how busy one is.
`gpus` are their models alone, for the class of a node.

It makes no CUDA context. `pynvml` is of the wheel nvidia-ml-py, in the extras `cu12` and `cu13`.
What a device does not know (ECC of a desktop card, MIG of an older one) is None or empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.node_class import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

#: NVML is initialised and shut down for the whole process
_lock = threading.Lock()


#: bytes a second of one lane of PCIe 1; each generation doubles it
_LANE = 250e6


@dataclasses.dataclass(frozen=True)
class Load:
    """What one GPU does now. None: it cannot say, as an instance of MIG."""

    #: share of the last moments (up to a second) in which a kernel ran
    kernels: float | None = None
    #: share of what the link to the host can carry in one direction, the busier one
    link: float | None = None
    #: why its clocks are not higher, as in ``nvmlClocksEventReasons``
    clocks: int = 0


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU."""

    index: int
    uuid: str
    name: str
    #: as in sysfs: "0000:3b:00.0"
    pci: str
    memory_bytes: int = 0
    used_bytes: int = 0
    #: since the driver was loaded
    uncorrected_errors: int | None = None
    #: rows of memory that are replaced at the next reset, or that could not be
    remap_pending: bool = False
    remap_failed: bool = False
    #: state of each NVLink; empty: it has none
    nvlinks: tuple[bool, ...] = ()
    #: None: it cannot be partitioned
    mig: bool | None = None
    #: after the next reset
    mig_pending: bool | None = None
    mig_uuids: tuple[str, ...] = ()
    #: (process id, bytes) with a context on it
    processes: tuple[tuple[int, int], ...] = ()
    load: Load = Load()


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What the driver says of all GPUs at one moment; plain values, so that it can be written as JSON."""

    #: why the driver cannot be asked, or some of the devices; empty: it answered
    reason: str = ""
    driver: str = ""
    #: 1000 x major + 10 x minor; 0: unknown
    cuda_of_driver: int = 0
    #: of the runtime that is installed; 0: there is none
    cuda_of_runtime: int = 0
    devices: tuple[Device, ...] = ()

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Snapshot:
        """From `dataclasses.asdict`, by way of JSON or not; TypeError for a name that is not known."""
        devices = [
            Device(
                **{
                    **d,
                    **{name: tuple(map(_tuple, d.get(name, ()))) for name in ("nvlinks", "mig_uuids", "processes")},
                    "load": Load(**d.get("load", {})),
                }
            )
            for d in tree.get("devices", ())
        ]
        return cls(**{**tree, "devices": tuple(devices)})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _Unavailable(Exception):
    """The driver cannot be asked; the text says why."""


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    """``pynvml``, initialised.

    Raises
    ------
    _Unavailable
        It is not installed, there is no driver, or a call failed.
    """
    try:
        import pynvml
    except Exception as e:
        raise _Unavailable(f"pynvml cannot be imported ({type(e).__name__}: {e})") from e
    with _lock:
        try:
            pynvml.nvmlInit()
        except Exception as e:  # the library raises all kinds where there is no driver
            raise _Unavailable(f"NVML: {e}") from e
        try:
            yield pynvml
        except (pynvml.NVMLError, AttributeError) as e:  # an older pynvml lacks names
            raise _Unavailable(f"NVML: {e}") from e
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def look() -> Snapshot:
    """The GPUs of this machine now; with a reason where there is no driver. Never raises."""
    try:
        with _library() as pynvml:
            devices, lost = [], []
            for i in range(pynvml.nvmlDeviceGetCount()):
                try:
                    devices.append(_device(pynvml, i))
                except pynvml.NVMLError as e:  # such as one that has fallen off the bus; the others are as they were
                    lost.append(f"GPU {i}: NVML: {e}")
            return Snapshot(
                "; ".join(lost),
                driver=_text(pynvml.nvmlSystemGetDriverVersion()),
                cuda_of_driver=int(pynvml.nvmlSystemGetCudaDriverVersion_v2()),
                cuda_of_runtime=_runtime(),
                devices=tuple(devices),
            )
    except _Unavailable as e:
        return Snapshot(str(e), cuda_of_runtime=_runtime())


def load(index: int) -> Load:
    """What a GPU of `look` does now; empty where it cannot be asked. Takes 50 ms, in which its link is watched."""
    try:
        with _library() as pynvml:
            return _load(pynvml, _asker(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)))
    except _Unavailable:
        return Load()


def gpus() -> tuple[tuple[Gpu, ...], str]:
    """All GPUs of the node, a divided one as its MIG instances, and the version of the driver.

    Nothing where the driver cannot be asked. Blocks for some milliseconds.
    """
    try:
        with _library() as pynvml:
            found: list[Gpu] = []
            count = pynvml.nvmlDeviceGetCount()
            for i in range(count):
                with contextlib.suppress(pynvml.NVMLError):  # it is lost, the others are not
                    handle = pynvml.nvmlDeviceGetHandleByIndex(i)
                    ask = _asker(pynvml, handle)
                    mode, _ = ask(pynvml.nvmlDeviceGetMigMode) or (0, 0)
                    found += [_gpu(pynvml, part) for part in (_instances(pynvml, ask) if mode else []) or [handle]]
            return (tuple(found), _text(pynvml.nvmlSystemGetDriverVersion())) if found or not count else ((), "")
    except _Unavailable:
        return (), ""


def _gpu(pynvml: Any, handle: Any) -> Gpu:
    model = _text(pynvml.nvmlDeviceGetName(handle))  # of an instance it ends in "MIG 1g.10gb"
    try:
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:  # a system on a chip has no memory of the device's own
        memory_bytes = 0
    return Gpu(vendor="NVIDIA", model=model, memory_bytes=memory_bytes)


def _load(pynvml: Any, ask: Callable[..., Any]) -> Load:
    rates = ask(pynvml.nvmlDeviceGetUtilizationRates)
    generation, lanes = ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration), ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth)
    directions = (pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    moved = [ask(pynvml.nvmlDeviceGetPcieThroughput, direction) for direction in directions]
    known = generation and lanes and None not in moved
    return Load(
        kernels=None if rates is None else rates.gpu / 100,
        link=1024 * max(moved) / (_LANE * 2 ** (generation - 1) * lanes) if known else None,
        clocks=ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons) or 0,
    )


def _runtime() -> int:
    try:
        from cuda.bindings import runtime

        error, version = runtime.getLocalRuntimeVersion()
    except Exception:  # not installed, or its library is not
        return 0
    return 0 if error else int(version)


def _asker(pynvml: Any, handle: Any) -> Callable[..., Any]:
    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        """None: this device, or this driver, cannot say."""
        try:
            return function(handle, *arguments)
        except pynvml.NVMLError:
            return None

    return ask


def _device(pynvml: Any, index: int) -> Device:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    ask = _asker(pynvml, handle)
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
    remapped = ask(pynvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
    mig = ask(pynvml.nvmlDeviceGetMigMode) or (None, None)
    links = [ask(pynvml.nvmlDeviceGetNvLinkState, i) for i in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    uncorrected, volatile = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return Device(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        pci=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId)[-12:].lower(),
        memory_bytes=0 if memory is None else int(memory.total),
        used_bytes=0 if memory is None else int(memory.used),
        uncorrected_errors=ask(pynvml.nvmlDeviceGetTotalEccErrors, uncorrected, volatile),
        remap_pending=bool(remapped[2]),
        remap_failed=bool(remapped[3]),
        nvlinks=tuple(bool(state) for state in links if state is not None),
        mig=None if mig[0] is None else bool(mig[0]),
        mig_pending=None if mig[1] is None else bool(mig[1]),
        mig_uuids=tuple(_text(pynvml.nvmlDeviceGetUUID(i)) for i in (_instances(pynvml, ask) if mig[0] else ())),
        processes=tuple(
            (int(p.pid), int(p.usedGpuMemory or 0)) for p in ask(pynvml.nvmlDeviceGetComputeRunningProcesses) or ()
        ),
        load=_load(pynvml, ask),
    )


def _instances(pynvml: Any, ask: Callable[..., Any]) -> list[Any]:
    """MIG instances of a GPU that is divided; some of their places may be empty."""
    count = ask(pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0
    found = (ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, i) for i in range(count))
    return [instance for instance in found if instance is not None]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
