"""Is `codec: auto` as fast as the best fixed codec? Four kinds of data, on the real disk and on emulated slower ones.

A slower disk is the real one whose reads and writes return no sooner than its bandwidth allows. Each figure is the time
to write a value and read it back through the tier, encoding and verifying included, medians of runs that take turns.

    python -m benchmarks.spill_codec --runs 5 --directory /scratch --out benchmarks/results/spill_codec.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks import compare, data
from dask_gpurt.tiers.storage.codec import PickleCodec
from dask_gpurt.tiers.storage.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable

CODECS = ("none", "lz4", "zstd", "auto")
#: name -> bytes per second, None: as it is
DISKS: dict[str, int | None] = {"disk": None, "500 MB/s": 500_000_000, "100 MB/s": 100_000_000}


class SlowOs:
    """`os`, whose vectored reads and writes take at least bytes / bandwidth."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("pwritev", "preadv"):
            return real

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            n = real(*args)
            time.sleep(max(0.0, n / self._rate - (time.perf_counter() - start)))
            return n

        return call


def values(nbytes: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    n = nbytes // 8
    sparse = np.zeros(n)
    sparse[rng.integers(0, n, n // 100)] = rng.random(n // 100)
    words = np.array([f"customer_{i:07d}_name" for i in range(50_000)], dtype=object)
    return {
        "numeric": np.cumsum(rng.integers(0, 1000, n)),
        "string": pd.DataFrame({"s": pd.Series(words[rng.integers(0, 50_000, nbytes // 30)], dtype="string")}),
        "sparse": sparse,
        "incompressible": rng.random(n),
    }


def one(folder: str, disk_name: str, kind: str, value: Any, runs: int) -> dict[str, Any]:
    rate = DISKS[disk_name]
    layer: Any = os if rate is None else SlowOs(rate)
    codec = PickleCodec()
    tiers = {name: DiskTier(os.path.join(folder, name), codec=name, os_layer=layer) for name in CODECS}
    used: dict[str, int] = {}

    def case(name: str) -> Callable[[], object]:
        def run() -> None:
            handle = tiers[name].write(codec.encode(value))
            used[name] = handle.nbytes
            handle.load(codec)
            handle.free()

        return run

    for name, tier in tiers.items():
        tier.probe()
        case(name)()
    results = compare.paired({name: case(name) for name in CODECS}, runs)
    fixed = {name: results[name].median for name in CODECS if name != "auto"}
    best = min(fixed, key=lambda name: fixed[name])
    out = {
        "disk": disk_name,
        "data": kind,
        "best_fixed": best,
        "auto_over_best_fixed": results["auto"].ratio(results[best]),
        "auto_chose": dict(tiers["auto"].compressed_frames),
        "cases": {name: {**results[name].to_dict(), "stored_bytes": used[name]} for name in CODECS},
    }
    for tier in tiers.values():
        tier.close()
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--size", type=int, default=32 << 20, help="bytes of a value")
    parser.add_argument("--directory", default=None, help="on the disk to use")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        rows = [
            one(folder, disk, kind, value, args.runs) for disk in DISKS for kind, value in values(args.size).items()
        ]
    report = {
        **data.facts(f"{data.cores()} CPU cores, one thread, one local disk, slower ones emulated by waiting"),
        "benchmark": "spill_codec",
        "runs": args.runs,
        "goal": "auto_over_best_fixed at most 1.05",
        "worst_auto_over_best_fixed": max(r["auto_over_best_fixed"] for r in rows),
        "rows": rows,
    }
    for r in rows:
        seconds = ", ".join(f"{c} {r['cases'][c]['median_s']:.3f} s" for c in CODECS)
        print(f"{r['disk']:10} {r['data']:15} {seconds}  auto/{r['best_fixed']} {r['auto_over_best_fixed']:.2f}")
    print(json.dumps({"worst": report["worst_auto_over_best_fixed"]}))
    if args.out:
        print(data.write_json(args.out, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
