"""`NodeClass`: what a worker's node is made of, and what runs on it. Workers whose nodes have one `key` are alike.

Each worker tells the scheduler its own once, when it starts (`dask_gpurt.preflight`). It is kept as plain values in
``WorkerState.extra[EXTRA]``, which clients see in ``client.scheduler_info()``. Plots, reports and prices use the key;
so does ``dask.annotate(gpurt={"node_class": "h200*"})``.

The key is the hardware: it does not change with an update. `NodeClass.stack` is the software. Memory in the key is
rounded to two digits, because two nodes of one kind differ by some megabytes.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distributed.scheduler import WorkerState

#: of the layout of `NodeClass.to_dict`
VERSION = 1
#: where the scheduler keeps it, in the ``extra`` of a worker
EXTRA = "gpurt_node_class"
#: in place of the key, of a worker that has not said its own
UNKNOWN = "unknown"

_GiB = 2**30
#: words of CPU and GPU names that do not distinguish
_NOISE = re.compile(r"\((?:r|tm)\)|@.*|\b(?:nvidia|amd|intel|cpu|processor|gpu|\d+-core)\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of a node, or one MIG instance of it."""

    vendor: str
    model: str
    memory_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeClass:
    """Facts of one node. What is unknown is empty, or 0."""

    version: int = VERSION
    #: all of the node, whether or not this worker may use them
    gpus: tuple[Gpu, ...] = ()
    #: model name
    cpu: str = ""
    #: of the machine; what a container may use of them is no hardware
    cores: int = 0
    memory_bytes: int = 0
    #: type of the file system that spilled data is on, such as ``ext4``
    filesystem: str = ""
    #: bits per second of each network card
    nics: tuple[int, ...] = ()
    #: package, driver or library -> version
    stack: tuple[tuple[str, str], ...] = ()

    @functools.cached_property
    def key(self) -> str:
        """Such as ``h200-8x140g.xeon-platinum-8480c.224c.2000g.ext4.400gbit``; without GPUs it begins with ``cpu``."""
        counts = collections.Counter((gpu.model, gpu.memory_bytes) for gpu in self.gpus)
        gpus = [f"{_slug(model)}-{n}x{_rounded_gib(memory)}g" for (model, memory), n in sorted(counts.items())]
        parts = [
            "+".join(gpus) or "cpu",
            _slug(self.cpu),
            f"{self.cores}c" if self.cores else "",
            f"{_rounded_gib(self.memory_bytes)}g" if self.memory_bytes else "",
            self.filesystem,
            f"{max(self.nics) / 1e9:g}gbit" if self.nics else "",
        ]
        return ".".join(part for part in parts if part)

    def matches(self, pattern: str) -> bool:
        """Whether the key fits a pattern as in file names (``*``, ``?``, ``[...]``), in any case of letters."""
        return fnmatch.fnmatchcase(self.key, pattern.lower())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, and the key for who only shows it."""
        return {**dataclasses.asdict(self), "stack": dict(self.stack), "key": self.key}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> NodeClass:
        """What `to_dict` made.

        Raises
        ------
        ValueError
            It is of another version, or not one.
        """
        if told.get("version") != VERSION:
            raise ValueError(f"a node class of version {told.get('version')!r}, must be {VERSION}")
        try:
            return cls(
                gpus=tuple(Gpu(**gpu) for gpu in told["gpus"]),
                cpu=str(told["cpu"]),
                cores=int(told["cores"]),
                memory_bytes=int(told["memory_bytes"]),
                filesystem=str(told["filesystem"]),
                nics=tuple(int(nic) for nic in told["nics"]),
                stack=tuple(sorted((str(k), str(v)) for k, v in dict(told["stack"]).items())),
            )
        except (KeyError, TypeError) as e:
            raise ValueError(f"not a node class: {e!r}") from e


def key_of(ws: WorkerState | None) -> str:
    """The key that the scheduler keeps of a worker; `UNKNOWN` of one that runs stock, for example."""
    kept = (getattr(ws, "extra", None) or {}).get(EXTRA) or {}
    return str(kept.get("key", UNKNOWN))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", _NOISE.sub(" ", name.lower())).strip("-")


def _rounded_gib(nbytes: int) -> str:
    """Two digits: 2015 GiB are 2000, 15.4 are 15, 7.7 stay."""
    return f"{float(f'{nbytes / _GiB:.2g}'):g}"
