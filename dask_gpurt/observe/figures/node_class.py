"""`node_class`: what kind of node a worker is on, in a few words: accelerator, threads, memory, network card.

Workers of one class are alike, so a plot can be in order of them, and a price can be given for all of them at once.
It is made of what workers tell the scheduler anyway: nothing is asked. Memory is rounded, since two workers of one kind
differ by some megabytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distributed.scheduler import WorkerState

GiB = 2**30


def node_class(
    *, accelerator: str | None, threads: int, memory_bytes: float, nic_bytes_per_second: float | None = None
) -> str:
    """Such as ``"NVIDIA H200, 16 threads, 64 GiB, 25 Gbit/s"``; what is unknown is left out."""
    parts = [] if not accelerator else [accelerator]
    parts.append(f"{threads} thread{'s' if threads != 1 else ''}")
    if memory_bytes > 0:
        parts.append(_memory(memory_bytes))
    if nic_bytes_per_second:
        parts.append(f"{nic_bytes_per_second * 8 / 1e9:.3g} Gbit/s")
    return ", ".join(parts)


def of_worker(ws: WorkerState | None, figures: Mapping[str, Any] | None) -> str:
    """The class of a scheduler's worker, with the figures of its heartbeat."""
    extra = getattr(ws, "extra", None) or {}
    gpu = extra.get("gpu") or {}
    return node_class(
        accelerator=gpu.get("name"),
        threads=int(getattr(ws, "nthreads", 0)),
        memory_bytes=float(getattr(ws, "memory_limit", 0) or 0),
        nic_bytes_per_second=(figures or {}).get("nic_bytes_per_second"),
    )


def _memory(nbytes: float) -> str:
    gib = nbytes / GiB
    return f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"
