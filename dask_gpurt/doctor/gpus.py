"""`Gpu`: what the driver says of the GPUs of a node: asked now (`Driver`), or recorded (`Recorded`).

Checks take a `Snapshot` only, so that a recording of another machine stands for this one.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Protocol

from dask_gpurt.backends import nvml
from dask_gpurt.backends.nvml import Snapshot
from dask_gpurt.errors import GpurtError


class Gpu(Protocol):
    """Where a snapshot is from."""

    #: put before what is found: "recorded: ", or nothing
    prefix: str

    def look(self) -> Snapshot:
        """What there is now. A `Snapshot` with a reason where the driver cannot be asked; never raises."""
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


def write(gpu: Gpu, path: str) -> None:
    """Record what is there now, as JSON."""
    with open(path, "w", encoding="utf-8") as f:
        json.dump(dataclasses.asdict(gpu.look()), f, indent=1)
        f.write("\n")
