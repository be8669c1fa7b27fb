"""AMD GPUs: whether there are any. There is no device tier for them yet, and this says so.

RMM's HIP port (hipMM) has the names that `cuda` relies on, but nothing here was ever run on such a device, so nothing
pretends to work: values on an AMD GPU are ordinary values, as with stock Dask.
"""

from __future__ import annotations

import os
from pathlib import Path

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")


def devices(nodes: Path = _KFD) -> int:
    """GPUs that the kernel driver shows; 0 without one."""
    count = 0
    try:
        for node in os.scandir(nodes):
            text = Path(node.path, "properties").read_text()
            values = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
            count += values.get("simd_count", "0").strip() != "0"  # a CPU is a node too
    except OSError:
        return count
    return count


def reason() -> str:
    """Why there is no device tier, for people."""
    n = devices()
    if not n:
        return "no AMD GPU"
    return f"{n} AMD GPU(s) found, for which there is no device tier; values on them stay where they are"
