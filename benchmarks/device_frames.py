"""Device frames through the shuffle over a stand-in, beside pandas on the same data: CPU, copies and memory.

    python -m benchmarks.device_frames [--rows 2000000] [--out FILE]

The stand-in is ordinary host memory from RMM with streams that run late (`tests/backends/host_frames.py`). There is no
GPU in it, and nothing here says how fast one would be. What it does say: how often each byte is copied, by what for;
how much of the memory that stands for a device's is taken at once, against its limit; and what the code around the
kernels costs in CPU seconds. Two worker processes of one thread each; inputs are in memory before it begins. Outputs
are compared with those of pandas, row by row and in their order, by a digest.
"""

from __future__ import annotations

import argparse
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xxhash
from dask import dataframe as dd
from distributed import Client, LocalCluster, wait

from benchmarks import data
from benchmarks.shuffle_meters import take_over
from tests.backends import host_frames
from tests.backends.host_frames import HostFrame
from tests.backends.lazy_memory import LazyMemory

if TYPE_CHECKING:
    from collections.abc import Callable

INPUTS, OUTPUTS = 16, 8
#: of a worker's share of the rows
LIMIT = 0.8
#: name -> (whether frames are on the stand-in, transport, whether UCX finds a device)
WAYS = {
    "pandas, tcp": (False, "tcp", False),
    "device frames, tcp": (True, "tcp", False),
    "device frames, rpc": (True, "rpc", False),
    "device frames, ucx": (True, "auto", True),
}


def part(i: int, n: int) -> pd.DataFrame:
    """An input."""
    rng = np.random.default_rng(i)
    k = rng.integers(0, 1 << 20, n)
    text = pd.Series(k % 1000).astype("str").astype("str")
    return pd.DataFrame({"k": k, "a": rng.random(n), "b": rng.integers(0, 9, n), "t": text})


def digest(frame: pd.DataFrame) -> tuple[int, int]:
    """(rows, digest of them in their order)."""
    hashes = pd.util.hash_pandas_object(pd.DataFrame(frame), index=True).to_numpy()
    return len(frame), int(xxhash.xxh3_64_intdigest(hashes.tobytes()))


def begin(limit_bytes: int, ucx: bool) -> None:
    """Give this process memory that stands for a device's."""
    host_frames.MEMORY = LazyMemory(limit_bytes)
    if ucx:
        host_frames.use_ucx()


def used() -> dict[str, Any]:
    """What this process has used so far."""
    memory = host_frames.MEMORY
    memory.drain()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu": usage.ru_utime + usage.ru_stime,
        "copied": dict(memory.copied) | {"device to device": host_frames.SIDE.sent},
        "peak": memory.peak_bytes(),
        "faults": list(memory.faults),
    }


def shuffles(dask_scheduler: Any) -> tuple[int, dict[str, int], int]:
    """(runs, fallbacks, errors)."""
    s = dask_scheduler.plugins["shuffle"].takeover.statistics()
    return s["runs"], s["fallbacks"], s["errors"]


def shuffle(name: str, rows: int) -> dict[str, Any]:
    """One shuffle on a cluster of its own."""
    device, transport, ucx = WAYS[name]
    n = rows // INPUTS
    row_bytes = _row_bytes(n)
    limit = int(rows * row_bytes / 2 * LIMIT)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.run_on_scheduler(take_over, transport=transport, device_frames=True)
        client.run(begin, limit, ucx)
        make: Callable[[int], pd.DataFrame] = _Make(n, device)
        source = client.persist(dd.from_map(make, list(range(INPUTS)), meta=make(0).iloc[:0]))
        wait(source)
        before = client.run(used)
        out = client.persist(source.shuffle("k", npartitions=OUTPUTS))
        wait(out)
        after = client.run(used)
        digests = client.gather(client.map(digest, client.compute(out.to_delayed()), pure=False))
        runs, fallbacks, errors = client.run_on_scheduler(shuffles)
    assert (runs, fallbacks, errors) == (1, {}, 0), (runs, fallbacks, errors)
    result: dict[str, Any] = {
        "CPU seconds": round(sum(after[w]["cpu"] - before[w]["cpu"] for w in after), 2),
        "faults": [fault for one in after.values() for fault in one["faults"]],
        "outputs": digests,
    }
    if device:
        copied: dict[str, int] = {}
        for one in after.values():
            for what, nbytes in one["copied"].items():
                copied[what] = copied.get(what, 0) + nbytes
        result["bytes of a row"] = round(row_bytes, 1)
        result["copies of a row"] = {what: round(nbytes / rows / row_bytes, 2) for what, nbytes in copied.items()}
        result["peak bytes of a worker"] = max(one["peak"] for one in after.values())
        result["limit of a worker"] = limit
    return result


class _Make:
    """Makes the inputs; a class, as it travels."""

    def __init__(self, n: int, device: bool) -> None:
        self.n, self.device = n, device

    def __call__(self, i: int) -> pd.DataFrame:
        return HostFrame(part(i, self.n)) if self.device else part(i, self.n)


def _row_bytes(n: int) -> float:
    """Of a row as it is shuffled, with the id of its output, which Dask keeps until the end, and its index."""
    frames = host_frames.HostFrames(LazyMemory(1 << 40))
    one = part(0, n)
    table, _ = frames.apart(HostFrame(one.assign(_partitions=0)), "_partitions", one.iloc[:0])
    return table.block.nbytes / n


def main() -> None:
    """See the module."""
    p = argparse.ArgumentParser(description="Device frames over a stand-in, beside pandas")
    p.add_argument("--rows", type=int, default=2_000_000)
    p.add_argument("--out", default="benchmarks/results/device_frames.json")
    args = p.parse_args()
    results = {name: shuffle(name, args.rows) for name in WAYS}
    want = results["pandas, tcp"]["outputs"]
    for name, result in results.items():
        result["rows equal to pandas, in their order"] = result.pop("outputs") == want
        print(name, result)
        assert result["rows equal to pandas, in their order"], name
        assert not result["faults"], result["faults"]
    facts = data.facts("host memory stand-in, no GPU")
    data.write_json(args.out, facts | {"rows": args.rows, "inputs": INPUTS, "outputs": OUTPUTS, "results": results})


if __name__ == "__main__":
    main()
