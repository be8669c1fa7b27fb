"""`Gpu`: what the driver says of the GPUs of a node: asked now (`Driver`), or recorded (`Recorded`).

Checks take a `Snapshot` only, so that a recording of another machine stands for this one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import re
import threading
from typing import TYPE_CHECKING, Protocol

from dask_gpurt.backends import cuda, nvml
from dask_gpurt.backends.nvml import Device, Load, Snapshot
from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dask_gpurt.backends.system import System


class Gpu(Protocol):
    """Where a snapshot is from."""

    #: put before what is found: "recorded: ", or nothing
    prefix: str

    def look(self) -> Snapshot:
        """What there is now. A `Snapshot` with a reason where the driver cannot be asked; never raises."""
        ...

    def load(self, device: Device) -> Load:
        """How busy one of them is now. May take 50 ms; never raises."""
        ...


class Driver:
    """The driver of this machine, through NVML."""

    prefix = ""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None

    def look(self) -> Snapshot:
        """See `Gpu.look`. It is asked once: checks that run beside each other see the same."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = nvml.look()
            return self._snapshot

    def load(self, device: Device) -> Load:
        """See `Gpu.load`."""
        return nvml.load(device.index)


class Recorded:
    """A recording (``dask gpurt doctor --record FILE``).

    Raises
    ------
    GpurtError
        The file is not one.
    """

    prefix = "recorded: "

    def __init__(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8") as f:
                self._snapshot = Snapshot.from_dict(json.load(f))
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise GpurtError(
                f"{path} is not a recording ({type(e).__name__}: {e}). Remedy: one that `dask gpurt doctor --record` "
                "of this version wrote"
            ) from e

    def look(self) -> Snapshot:
        """See `Gpu.look`."""
        return self._snapshot

    def load(self, device: Device) -> Load:
        """See `Gpu.load`: as it was."""
        return device.load


def write(gpu: Gpu, path: str) -> None:
    """Record what is there now, as JSON."""
    with open(path, "w", encoding="utf-8") as f:
        json.dump(dataclasses.asdict(gpu.look()), f, indent=1)
        f.write("\n")


def is_wanted(environ: Mapping[str, str], system: System) -> bool:
    """Whether this process is meant to have an NVIDIA GPU. In a container sysfs shows all those of the host, also to
    workers that were given none on purpose."""
    if cuda.given(environ) == []:  # hidden on purpose, as from workers for CPUs
        return False
    given = environ.get("NVIDIA_VISIBLE_DEVICES")
    # So the container toolkit gives none. With CDI it is set too, and the devices are there all the same.
    if given in ("", "none", "void") and "nvidiactl" not in system.names("dev"):
        return False
    if given or environ.get("CUDA_VISIBLE_DEVICES"):
        return True
    return any(re.search(r"-cu\d\d$", d.name or "") for d in importlib.metadata.distributions())


def visible(environ: Mapping[str, str], snapshot: Snapshot) -> list[Device]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in its order, up to one that is not there; all without it."""
    words = cuda.given(environ)
    if words is None:
        return list(snapshot.devices)
    found = itertools.takewhile(lambda d: d is not None, (named(word, snapshot) for word in words))
    return [d for d in found if d is not None]


def named(word: str, snapshot: Snapshot) -> Device | None:
    """A device by index or by UUID, which may be shortened; a MIG instance stands for its parent."""
    for d in snapshot.devices:
        if word == str(d.index) or (len(word) > 4 and d.uuid.startswith(word)) or word in d.mig_uuids:
            return d
    return None
