"""What each step of a shuffle of device frames costs, in milliseconds for a GB of rows."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks.gpu.target import MB

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.target import Target

OUTPUTS, RUNS = 64, 5


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: numbers, or text (a column of about 30 characters besides)."""
    rows = max(5_000, int(1024 * MB * target.scale**2 / 64))
    rng = np.random.default_rng(0)
    data = pd.DataFrame({f"v{i}": rng.integers(0, 1 << 40, rows) for i in range(6)})
    if what == "text":
        data["s"] = (
            pd.Series([f"a text of some length {k}" for k in range(1000)], dtype="str")
            .iloc[rng.integers(0, 1000, rows)]
            .reset_index(drop=True)
        )
    data["_partitions"] = rng.integers(0, OUTPUTS, rows)
    frame, meta = target.frame(data), target.frame(data.drop(columns="_partitions").iloc[:0])
    frames = target.device_frames()
    code_of = np.arange(OUTPUTS, dtype=np.uint8)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        frames.ready()
        start = time.perf_counter()
        out = call(*arguments)
        frames.ready()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return out

    wrong = 0
    for _ in range(RUNS):
        table, ids = timed("apart", frames.apart, frame, "_partitions", meta)
        ordered, offsets = timed("order", frames.order, table, ids, code_of, OUTPUTS)
        ranges = [(int(a), int(b)) for a, b in itertools.pairwise(offsets)]
        packs = timed("pack", frames.pack, ordered, ranges)
        nbytes = sum(pack.nbytes for pack in packs)
        pointer = target.pinned(nbytes)
        room = _view(pointer, nbytes)
        timed("to_host, pinned", frames.to_host, packs, room)
        heads = [(pack.head, pack.nbytes) for pack in packs]
        del packs, table, ordered
        again = timed("from_host, pinned", _back, frames, heads, room)
        joined = timed("unpack and concat", _joined, frames, again)
        out = timed("frame", frames.frame, joined, meta)
        wrong += int(out["v0"].sum()) != int(data["v0"].sum()) or len(out) != rows
        del again, joined, out, room
        target.release(pointer, pinned=True)
    result: dict[str, Any] = {
        "rows": rows,
        "bytes": nbytes,
        "outputs": OUTPUTS,
        "milliseconds_per_gigabyte": {
            name: round(1000 * min(all_) * 1e9 / nbytes, 2) for name, all_ in (seconds | more(target, frame)).items()
        },
    }
    if wrong:
        result["problem"] = f"{wrong} of {RUNS} runs gave other rows"
    return result


def _view(pointer: int, nbytes: int) -> memoryview:
    import ctypes

    return memoryview((ctypes.c_ubyte * nbytes).from_address(pointer)).cast("B")


def _back(frames: Any, heads: list[tuple[bytes, int]], room: memoryview) -> list[Any]:
    out, at = [], 0
    for head, nbytes in heads:
        out.append(frames.from_host(head, room[at : at + nbytes]))
        at += nbytes
    return out


def _joined(frames: Any, packs: list[Any]) -> Any:
    return frames.concat([frames.unpack(pack) for pack in packs])


def more(target: Target, frame: Any) -> dict[str, list[float]]:
    """What the shuffle does not use, to compare with: libcudf's partition, and packing in chunks as spilling does."""
    if target.name != "gpu":
        return {}
    import pylibcudf as plc

    from dask_gpurt.backends.cudf_values import PackedTable

    table, _ = frame.to_pylibcudf()
    ids, _ = frame["_partitions"].astype("i4").to_pylibcudf()
    out: dict[str, list[float]] = {"plc.partitioning.partition": [], "ChunkedPack to pinned": []}
    for _ in range(RUNS):
        target.synchronize()
        start = time.perf_counter()
        plc.partitioning.partition(table, ids, OUTPUTS)
        target.synchronize()
        out["plc.partitioning.partition"].append(time.perf_counter() - start)
        packed = PackedTable(table.columns())
        pointer = target.pinned(packed.nbytes)
        start = time.perf_counter()
        packed.copy_to([_view(pointer, packed.nbytes)])
        out["ChunkedPack to pinned"].append(time.perf_counter() - start)
        target.release(pointer, pinned=True)
    return out
