"""A frame that shares its buffers, or shows a slice of large ones, leaves the device: what RMM gives back.

It happens twice, with a frame made anew. The first time pages may have to be locked for it, which takes longer than the
copy; the second time they are there.
"""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks.gpu.target import MB, memory

if TYPE_CHECKING:
    from benchmarks.gpu.target import Target
    from dask_gpurt.tiers.device.setup import DeviceMemory


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: shared, two objects over the same buffers; sliced, a quarter of a frame of which the rest is dropped."""
    nbytes = int(1024 * MB * target.scale)
    with tempfile.TemporaryDirectory() as folder:
        device = memory(8 * nbytes, 4 * nbytes, folder)
        out: dict[str, Any] = {turn: once(device, what, target, nbytes) for turn in ("first", "again")}
        statistics = device.statistics()
        device.space.validate()
        device.close()
    out |= {"below": statistics["below"], "unspillable": statistics["unspillable"]}
    stayed = [out[turn]["after_bytes"] for turn in ("first", "again")]
    if max(stayed) > 0.02 * nbytes or statistics["unspillable"]:
        out["problem"] = f"{stayed} of {nbytes} bytes did not leave: {statistics['last_error']}"
    return out


def once(device: DeviceMemory, what: str, target: Target, nbytes: int) -> dict[str, Any]:
    """Make it, have it leave and come back, and forget it. Rates are of bytes that were copied."""
    base = device.allocator.allocated_bytes()
    if target.name == "gpu":
        rows = nbytes // 24
        words = pd.Series([f"row-{k % 97}" for k in range(min(rows, 1 << 20))], dtype="str")
        text = pd.concat([words] * (rows // len(words) + 1), ignore_index=True).iloc[:rows]
        value = target.frame(pd.DataFrame({"a": np.arange(rows), "b": np.arange(rows) * 0.5, "s": text}))
        if what == "sliced":
            value = value.iloc[rows // 4 : rows // 2]
    else:
        value = target.value(7, nbytes)
    values = [value, target.view(value)] if what == "shared" else [value]
    boxes = [device.space.put(i, v) for i, v in enumerate(values)]
    del value, values
    before = device.allocator.allocated_bytes() - base
    copied = _copied(device)
    start = time.perf_counter()
    counted = device.space.spill(1 << 60)
    left = time.perf_counter()
    copied = _copied(device) - copied
    after = device.allocator.allocated_bytes() - base
    middle = time.perf_counter()
    for box in boxes:
        box.get()
    came = time.perf_counter()
    back = device.allocator.allocated_bytes() - base
    for box in boxes:
        device.space.remove(box)
    return {
        "before_bytes": before,
        "counted_bytes": counted,
        "copied_bytes": copied,
        "after_bytes": after,
        "back_bytes": back,
        "out_gigabytes_per_second": round(copied / (left - start) / 1e9, 2),
        "in_gigabytes_per_second": round(back / (came - middle) / 1e9, 2),
    }


def _copied(device: DeviceMemory) -> int:
    pinned: Any = device.space.below[0]
    return int(pinned.metrics["written_bytes"])
