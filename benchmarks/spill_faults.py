"""Spilling while disks fail, files rot and workers die: what comes back, and what is left lying about.

Parts, each of which can be run in pieces (``--first``, ``--last``); with ``--out`` the pieces of a part are added up:

full    For k = 1, 2, ...: from the k-th write on the disk is full (ENOSPC from an injector in C, preloaded) until the
        job is done. Then: is every result right, how many files are left, is the next job right?
calls   The k-th write is short or fails with EIO, a read fails with EIO, a rename or fsync with ENOSPC; once each.
flips   A bit of a random byte of a spilled value is flipped; then it is used. Detected, and the answer right?
cuts    The same with a file cut off at a random place.
kills   kill -9 of a worker that is spilling. Is the result right, and are files left when the cluster is gone?

``--kind stock`` does the same to Dask without the tiers; its damaged values are counted as wrong answers.

    python -m benchmarks.spill_faults full --first 1 --last 200 --out benchmarks/results/spill_faults.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from distributed import Client, LocalCluster, Nanny, Scheduler, Worker, wait
from distributed.diskutils import WorkSpace

from benchmarks import data
from benchmarks.spill_loop import Tiers
from dask_gpurt.config import Settings
from dask_gpurt.tiers.storage.disk import tier as disk_module

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

HERE = os.path.dirname(os.path.abspath(__file__))
#: values that fit in a segment, in a file, and in several chunks
SIZES = (20_000, 300_000)
#: of a worker in this process; what matters is the share that may stay in memory
MEMORY_LIMIT = 2_000_000_000
HOST_LIMIT = 0.001
WRITE, READ, RENAME, SYNC = range(4)
MODES = {
    "short write": (WRITE, 0),
    "EIO on write": (WRITE, errno.EIO),
    "EIO on read": (READ, errno.EIO),
    "ENOSPC on rename": (RENAME, errno.ENOSPC),
    "ENOSPC on fsync": (SYNC, errno.ENOSPC),
}


def make(i: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 255, SIZES[i % len(SIZES)], dtype="u1")


def total(array: np.ndarray[Any, Any]) -> int:
    return int(array.sum(dtype="u8"))


def slowly(i: int) -> np.ndarray[Any, Any]:
    time.sleep(0.01)
    return np.random.default_rng(i).integers(0, 255, 2_000_000, dtype="u1")


# ---------------------------------------------------------------------------------------------- the injector


def build(folder: str) -> str:
    library = os.path.join(folder, "faults.so")
    source = os.path.join(HERE, "faults", "faults.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


def with_injector(argv: list[str]) -> int:
    """This program again, with the injector loaded."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LD_PRELOAD": build(folder), "GPURT_FAULTS": "1"}
        return subprocess.run([sys.executable, "-m", "benchmarks.spill_faults", *argv], env=env, check=False).returncode


class Injector:
    def __init__(self, prefix: str) -> None:
        self._library = ctypes.CDLL(None)
        self._library.gpurt_fault_hits.restype = ctypes.c_long
        self._prefix = prefix.encode()

    def arm(self, kind: int, error: int, nth: int, after: bool) -> None:
        self._library.gpurt_fault_arm(self._prefix, kind, error, ctypes.c_long(nth), int(after))

    def disarm(self) -> int:
        """Calls that went wrong."""
        self._library.gpurt_fault_disarm()
        return int(self._library.gpurt_fault_hits())


# ---------------------------------------------------------------------------------------------- one worker


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Until it holds, or the time is over."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)


class Bench:
    """A scheduler, a worker and a client in this process; almost everything the worker makes is spilled."""

    def __init__(self, kind: str, worker: Worker, client: Client) -> None:
        self.kind = kind
        self.worker = worker
        self.client = client

    @property
    def folder(self) -> str:
        return os.path.join(self.worker.local_directory, "gpurt-tiers" if self.kind == "tiers" else "storage")

    def files(self) -> list[str]:
        return [os.path.join(self.folder, n) for n in sorted(os.listdir(self.folder))]

    async def settled(self) -> None:
        """Until what was released is deleted."""
        await _until(lambda: not self.worker.state.tasks, 60)
        if self.kind == "tiers":
            await self.worker.plugins["tiers"].runtime.engine.idle()

    async def job(self, n: int, seed: int, *, between: Callable[[], object] = lambda: None) -> tuple[int, int]:
        """(results that are not there, results that are wrong) of `n` values, each made, spilled and used."""
        keys = range(seed, seed + n)
        arrays = self.client.map(make, keys, pure=False)
        await wait(arrays)
        if self.kind == "tiers":
            await self.worker.plugins["tiers"].runtime.engine.idle()
        between()
        sums = await asyncio.wait_for(self.client.gather(self.client.map(total, arrays), errors="skip"), 120)
        want = [total(make(i)) for i in keys]
        return n - len(sums), sum(a != b for a, b in zip(sums, want, strict=False)) if len(sums) == n else 0


@contextlib.asynccontextmanager
async def bench(kind: str, folder: str) -> AsyncIterator[Bench]:
    config: dict[str, Any] = {
        f"distributed.worker.memory.{k}": False for k in ("target", "spill", "pause", "terminate")
    }
    config["distributed.worker.memory.target"] = HOST_LIMIT
    with dask.config.set(config):
        async with (
            Scheduler(port=0, dashboard_address=":0") as scheduler,
            Worker(scheduler.address, local_directory=folder, memory_limit=MEMORY_LIMIT, nthreads=2) as worker,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            if kind == "tiers":
                settings = Settings.load({"tiers.host-limit": HOST_LIMIT, "tiers.disk-reserve": 0}).tiers
                await client.register_plugin(Tiers(settings))
            yield Bench(kind, worker, client)


# ---------------------------------------------------------------------------------------------- parts


async def full(kind: str, first: int, last: int, folder: str) -> Counter[str]:
    out: Counter[str] = Counter()
    async with bench(kind, folder) as b:
        injector = Injector(b.worker.local_directory)
        for k in range(first, last + 1):
            injector.arm(WRITE, errno.ENOSPC, k, after=True)
            missing, wrong = await b.job(2 * k // len(SIZES) + 30 + k, 1000 * k)
            out["full, writes refused"] += injector.disarm()
            await b.settled()
            out["full, runs"] += 1
            out["full, results missing"] += missing
            out["full, results wrong"] += wrong
            out["full, runs that left files"] += bool(b.files())
            out["full, files left"] += len(b.files())
            if kind == "stock":
                # They would be counted again in every later run.
                for file in b.files():
                    os.unlink(file)
            missing, wrong = await b.job(12, 1000 * k + 500)
            out["full, next job right"] += missing + wrong == 0
            await b.settled()
    return out


async def calls(kind: str, first: int, last: int, folder: str) -> Counter[str]:
    out: Counter[str] = Counter()
    async with bench(kind, folder) as b:
        injector = Injector(b.worker.local_directory)
        for mode, (what, error) in MODES.items():
            if what == SYNC and kind == "tiers":  # only large files that go through the page cache are synced
                disk_module._SYNCED = 1
                for disk in b.worker.plugins["tiers"].runtime._disk.disks:
                    disk.direct = False
            for k in range(first, last + 1):
                if what != READ:
                    injector.arm(what, error, k, after=False)
                missing, wrong = await b.job(
                    30,
                    1000 * k,
                    between=lambda e=error, k=k, w=what: injector.arm(READ, e, k, False) if w == READ else 0,  # type: ignore[misc]
                )
                out[f"{mode}, hits"] += injector.disarm()
                await b.settled()
                out[f"{mode}, runs"] += 1
                out[f"{mode}, results missing"] += missing
                out[f"{mode}, results wrong"] += wrong
                out[f"{mode}, files left"] += len(b.files())
    return out


async def damage(kind: str, first: int, last: int, folder: str, what: str) -> Counter[str]:
    """Each number from `first` to `last` is one flip or cut; several per job, in different values."""
    out: Counter[str] = Counter()
    rng = random.Random(first)
    async with bench(kind, folder) as b:
        done = first
        while done <= last:
            spoilt: list[str] = []

            def spoil(limit: int = last - done + 1, spoilt: list[str] = spoilt) -> None:
                places = _places(b)
                rng.shuffle(places)
                for file, start, end in places[: min(limit, 20)]:
                    if what == "cuts":
                        if file in spoilt:
                            continue
                        os.truncate(file, rng.randrange(start, end))
                    else:
                        with open(file, "r+b") as f:
                            at = rng.randrange(start, end)
                            f.seek(at)
                            byte = f.read(1)[0]
                            f.seek(at)
                            f.write(bytes([byte ^ (1 << rng.randrange(8))]))
                    spoilt.append(file)

            before = _detected(b)
            missing, wrong = await b.job(40, 1000 * done, between=spoil)
            # What is cut off behind the first damaged record of a segment is detected too.
            out[f"{what}, detected"] += min(len(spoilt), _detected(b) - before)
            out[f"{what}, done"] += len(spoilt)
            out[f"{what}, results missing"] += missing
            out[f"{what}, results wrong"] += wrong
            await b.settled()
            out[f"{what}, files left"] += len(b.files())
            done += len(spoilt)
    return out


def _places(b: Bench) -> list[tuple[str, int, int]]:
    """(file, from, to) of each spilled value."""
    if b.kind == "stock":
        return [(f, 0, os.path.getsize(f)) for f in b.files()]
    out = []
    engine = b.worker.plugins["tiers"].runtime.engine
    for entry in engine.books.entries:
        handle = entry.handle
        if handle is not None and not entry.in_memory and entry.weak is not None and entry.weak() is not None:
            continue  # somebody holds the object, so its copy is not read
        if handle is not None and not entry.in_memory:
            frames = handle.frames
            path = os.path.join(b.folder, handle.name)
            out.append((path, frames[0].offset, frames[-1].offset + frames[-1].extent_bytes))
    return out


def _detected(b: Bench) -> int:
    return b.worker.plugins["tiers"].runtime.engine.counters.lost if b.kind == "tiers" else 0


async def kills(kind: str, first: int, last: int, folder: str) -> Counter[str]:
    """Two workers under nannies; one is killed while it has files. Files are counted when the nanny has a new one."""
    out: Counter[str] = Counter()
    limit = 400_000_000
    config = {
        "distributed.worker.memory.target": 0.05,
        "distributed.worker.memory.pause": False,
        # Else the timer of an earlier loss closes a nanny for good while it restarts its worker.
        "distributed.deploy.lost-worker-timeout": "1 hour",
    }
    with dask.config.set(config):
        async with (
            LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                processes=True,
                memory_limit=limit,
                local_directory=folder,
                dashboard_address=None,
                silence_logs=logging.ERROR,
                asynchronous=True,
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            if kind == "tiers":
                settings = Settings.load({"tiers.host-limit": 0.05, "tiers.disk-reserve": 0}).tiers
                await client.register_plugin(Tiers(settings))
            for k in range(first, last + 1):
                keys = range(1000 * k, 1000 * k + 40)
                arrays = client.map(slowly, keys, pure=False)  # held, so that they do not go when they are summed
                sums = client.map(total, arrays)
                victim: Nanny = cluster.workers[k % 2]
                await _until(lambda: bool(_spilled(folder)), 20)
                await asyncio.sleep(random.Random(k).random() * 0.15)
                out["kills, of a worker with files"] += bool(_spilled(folder))
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)
                got = await asyncio.wait_for(client.gather(sums), 120)
                out["kills, done"] += 1
                out["kills, results right"] += got == [total(slowly(i)) for i in keys]
                del sums, arrays
                await client.wait_for_workers(2)
                # By the time a new worker runs, its start has purged what the dead one left.
                await _until(lambda: not _spilled(folder), 10)
                out["kills, files left"] += len(_spilled(folder))
    WorkSpace(os.path.join(folder, "dask-scratch-space"))
    out["kills, files left at the end"] = len(_spilled(folder))
    return out


def _spilled(folder: str) -> list[str]:
    found = []
    for root, _, names in os.walk(folder):
        if os.path.basename(root) in ("gpurt-tiers", "storage"):
            found += [os.path.join(root, n) for n in names]
    return found


PARTS: dict[str, Callable[[str, int, int, str], Awaitable[Counter[str]]]] = {
    "full": full,
    "calls": calls,
    "flips": lambda kind, first, last, folder: damage(kind, first, last, folder, "flips"),
    "cuts": lambda kind, first, last, folder: damage(kind, first, last, folder, "cuts"),
    "kills": kills,
}


def add_up(path: str, kind: str, part: str, piece: tuple[int, int], counts: Counter[str]) -> str:
    """Add the counts of a piece to those in the file. A piece that is in it already is an error."""
    report = data.earlier(path)
    report.update(data.facts(f"{data.cores()} CPU cores, one process, local disk; kills: 2 worker processes"))
    report["benchmark"] = "spill_faults"
    pieces = report.setdefault("pieces", {}).setdefault(kind, {}).setdefault(part, [])
    if list(piece) in pieces:
        raise SystemExit(f"{kind} {part} {piece} is in {path} already")
    pieces.append(list(piece))
    sums = report.setdefault("counts", {}).setdefault(kind, {}).setdefault(part, {})
    for name, n in sorted(counts.items()):
        sums[name] = sums.get(name, 0) + n
    return data.write_json(path, report)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--kind", choices=("tiers", "stock"), default="tiers")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, default=10)
    parser.add_argument("--directory", default=None, help="on the disk to use")
    parser.add_argument("--out", help="JSON file to add the counts to")
    args = parser.parse_args(argv)
    if args.part in ("full", "calls") and not os.environ.get("GPURT_FAULTS"):
        return with_injector(argv)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        counts: Any = asyncio.run(PARTS[args.part](args.kind, args.first, args.last, folder))  # type: ignore[arg-type]
    print(json.dumps({args.kind: counts, "seconds": round(time.perf_counter() - start, 1)}, indent=1))
    if args.out:
        print(add_up(args.out, args.kind, args.part, (args.first, args.last), counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
