"""A frame that shares its buffers, or shows a slice of large ones, leaves the device: what RMM gives back."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks.gpu.target import MB, memory

if TYPE_CHECKING:
    from benchmarks.gpu.target import Target


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: shared, two objects over the same buffers; sliced, a quarter of a frame of which the rest is dropped."""
    nbytes = int(1024 * MB * target.scale)
    with tempfile.TemporaryDirectory() as folder:
        device = memory(8 * nbytes, 4 * nbytes, folder)
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
        start = time.perf_counter()
        counted = device.space.spill(1 << 60)
        seconds = time.perf_counter() - start
        after = device.allocator.allocated_bytes() - base
        statistics = device.statistics()
        for box in boxes:
            box.get()
        back = device.allocator.allocated_bytes() - base
        device.space.validate()
        device.close()
    out: dict[str, Any] = {
        "before_bytes": before,
        "counted_bytes": counted,
        "after_bytes": after,
        "back_bytes": back,
        "gigabytes_per_second": round((before - after) / seconds / 1e9, 2),
        "below": statistics["below"],
        "unspillable": statistics["unspillable"],
    }
    if after > 0.02 * before or statistics["unspillable"]:
        out["problem"] = f"{after} of {before} bytes did not leave: {statistics['last_error']}"
    return out
