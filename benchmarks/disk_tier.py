"""The disk tier against what ``dd`` reaches with direct I/O on the same disk, taking turns.

Per round and size: ``dd`` writes a file of that size with ``oflag=direct``, the tier writes an array (encoded, copied,
checksummed, renamed), ``dd`` reads its file with ``iflag=direct``, the tier reads and verifies. ``dd`` says itself how
long it took, without the start of its process. Beside it the tier through the page cache (``direct-io: off``), and how
much the resident set and the page cache of the machine grew by a write.

    python -m benchmarks.disk_tier --runs 7 --directory /scratch --out benchmarks/results/disk_tier.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import parse_bytes

from benchmarks import compare, data
from dask_gpurt.memory.pages import pages
from dask_gpurt.tiers.storage.codec import PickleCodec
from dask_gpurt.tiers.storage.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = ("dd", "tier", "tier-cached")


def dd(path: str, nbytes: int, write: bool) -> float:
    """Seconds that dd says it took."""
    ends = [f"of={path}", "if=/dev/zero", "oflag=direct"] if write else [f"if={path}", "of=/dev/null", "iflag=direct"]
    done = subprocess.run(
        ["dd", *ends, "bs=4M", f"count={nbytes // (4 << 20)}"], capture_output=True, text=True, check=True
    )
    match = re.search(r", ([\d.e-]+) s,", done.stderr)
    if match is None:
        raise RuntimeError(f"cannot read the figures of dd: {done.stderr!r}")
    return float(match[1])


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def meminfo(*names: str) -> int:
    with open("/proc/meminfo") as f:
        fields = dict(line.split(":", 1) for line in f)
    return sum(int(fields[n].split()[0]) * 1024 for n in names)


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one_size(folder: str, nbytes: int, runs: int) -> dict[str, Any]:
    codec = PickleCodec()
    tiers = {
        "tier": DiskTier(os.path.join(folder, "direct")),
        "tier-cached": DiskTier(os.path.join(folder, "cached"), direct_io="off"),
    }
    value = np.random.default_rng(0).integers(0, 255, nbytes, dtype="u1")
    dd_file = os.path.join(folder, "dd.bin")
    seconds: dict[str, dict[str, list[float]]] = {d: {c: [] for c in CASES} for d in ("write", "read")}
    grew: dict[str, list[int]] = {c: [] for c in tiers}
    cached: dict[str, list[int]] = {c: [] for c in tiers}
    for name, tier in tiers.items():  # chunks, names, code: once
        tier.write(codec.encode(value)).free()
        del name
    for _, case in compare.turns(CASES, runs):
        if case == "dd":
            if os.path.exists(dd_file):
                os.unlink(dd_file)
            seconds["write"][case].append(dd(dd_file, nbytes, write=True))
            seconds["read"][case].append(dd(dd_file, nbytes, write=False))
            continue
        tier = tiers[case]
        rss, cache = resident(), meminfo("Cached")
        took, handle = timed(lambda tier=tier: tier.write(codec.encode(value)))  # type: ignore[misc]
        seconds["write"][case].append(took)
        grew[case].append(resident() - rss)
        cached[case].append(meminfo("Cached") - cache)
        took, (got, _) = timed(lambda handle=handle: handle.load(codec))  # type: ignore[misc]
        seconds["read"][case].append(took)
        if not np.array_equal(got, value):
            raise AssertionError("the tier gave back other bytes")
        handle.free()
        del got
    out: dict[str, Any] = {"nbytes": nbytes, "direct_io": tiers["tier"].direct}
    for direction, cases in seconds.items():
        baseline = compare.Case("dd", tuple(cases["dd"]))
        out[direction] = {
            name: {
                "bytes_per_second": {
                    "median": nbytes / statistics.median(s),
                    "all": [nbytes / x for x in s],
                },
                "speed_over_dd": 1 / compare.Case(name, tuple(s)).ratio(baseline),
            }
            for name, s in cases.items()
        }
    out["rss_growth_bytes"] = {c: statistics.median(g) for c, g in grew.items()}
    out["page_cache_growth_bytes"] = {c: statistics.median(g) for c, g in cached.items()}
    for tier in tiers.values():
        tier.close()
    os.unlink(dd_file)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=["16MiB", "64MiB", "256MiB"], help="multiples of 4 MiB")
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    pages.allowance_bytes = 64 << 20  # the least that a worker has
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        sizes = [one_size(folder, parse_bytes(s) // (4 << 20) * (4 << 20), args.runs) for s in args.sizes]
    report = {
        **data.facts(f"{data.cores()} CPU cores, one thread, one local disk"),
        "benchmark": "disk_tier",
        "runs": args.runs,
        "goal": "speed_over_dd of case tier at least 0.85, write and read",
        "least_speed_over_dd": min(s[d]["tier"]["speed_over_dd"] for s in sizes for d in ("write", "read")),
        "sizes": sizes,
    }
    print(
        json.dumps(
            [
                {
                    "MiB": s["nbytes"] >> 20,
                    **{
                        d: {
                            c: f"{v['bytes_per_second']['median'] / 1e9:.2f} GB/s, {v['speed_over_dd']:.2f} of dd"
                            for c, v in s[d].items()
                        }
                        for d in ("write", "read")
                    },
                    "rss": s["rss_growth_bytes"],
                    "cache": s["page_cache_growth_bytes"],
                }
                for s in sizes
            ],
            indent=1,
        )
    )
    if args.out:
        print(data.write_json(args.out, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
