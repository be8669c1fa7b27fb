"""TPC-H data by ``tpchgen-cli``, cached by scale, in files that every reader takes.

Each table is a directory of parquet parts; one part is one Dask partition. Parts are sized so that a partition of the
columns a query really reads is tens of megabytes: large enough that a task outweighs its scheduling, small enough that
several fit in a worker.

The generator marks its strings as Arrow ``string_view``. Arrow has no ``take`` kernel for that type (pyarrow 26), so
pandas cannot even build the empty frames that dask.dataframe plans with. The parts are therefore rewritten once with
plain strings. Values are not touched: decimals stay ``decimal128(15, 2)`` and dates ``date32``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from dask_gpurt.bench.progress import Progress, no_progress
from dask_gpurt.bench.tpch.reference import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

#: parts per table at scale 1; they grow with the scale
PARTS_AT_1 = {"lineitem": 8, "orders": 4, "partsupp": 2, "customer": 2, "part": 1, "supplier": 1}
#: fewest parts at any scale: the large tables stay divided, so that joins shuffle at scale 0.01 too
FEWEST = {"lineitem": 4, "orders": 2, "partsupp": 2, "customer": 2, "part": 1, "supplier": 1}
#: largest scale offered; beyond it the fixed names and checks here were never tried
MAX_SCALE = 1000.0

#: what is written beside the tables when they are complete
_STAMP = "complete.json"
#: the folder in which tables are made; when all are, with the stamp, each is moved to its place
_BUILDING = "dask-gpurt-unfinished"
#: changes when the layout changes, so that an old cache is not taken for a new one
_LAYOUT = 2


def check_scale(scale: float) -> float:
    """Return `scale`, or raise ValueError with what is allowed."""
    if not (math.isfinite(scale) and 0.001 <= scale <= MAX_SCALE):
        raise ValueError(f"scale is {scale!r}, must be a number from 0.001 to {MAX_SCALE:g} (1 is about 1 GB of text)")
    return scale


def parts(scale: float) -> dict[str, int]:
    """Table -> number of files at `scale`."""
    out = {t: max(FEWEST[t], round(n * scale)) for t, n in PARTS_AT_1.items()}
    return {**out, "nation": 1, "region": 1}


def ensure(
    directory: str, scale: float, say: Callable[[str], None] = lambda text: None, progress: Progress = no_progress
) -> str:
    """Make `directory` hold all eight tables at `scale`; do nothing if it already does. Returns `directory`.

    Raises
    ------
    ValueError
        The directory holds tables of another scale, or something that is not ours.
    RuntimeError
        The generator is missing or failed.
    """
    check_scale(scale)
    want = {"scale": scale, "layout": _LAYOUT, "parts": parts(scale)}
    building = os.path.join(directory, _BUILDING)
    for folder in (directory, building):
        stamp = os.path.join(folder, _STAMP)
        if not os.path.exists(stamp):
            continue
        with open(stamp) as f:
            have = json.load(f)
        if have != want:
            raise ValueError(
                f"{directory} holds TPC-H at scale {have.get('scale')!r} (layout {have.get('layout')!r}), "
                f"wanted scale {scale!r} (layout {_LAYOUT}). Remedy: another --data, or remove that directory"
            )
        if folder == building:  # complete, and interrupted while it was moved
            _move(building, directory)
        return directory
    # Folders with the names of the tables may be a user's own TPC-H, also beside what an interrupted run left:
    # nothing but our own folder is removed.
    if os.path.isdir(directory) and set(os.listdir(directory)) - {_BUILDING}:
        raise ValueError(
            f"{directory} exists and is not a data directory of this benchmark (no {_STAMP}). "
            f"Remedy: give an empty or a new directory"
        )
    generator = _generator()  # before anything is written
    if os.path.isdir(building):  # left by an interrupted run: a part may be torn
        shutil.rmtree(building)
    raw = os.path.join(building, "raw")
    os.makedirs(raw)
    _generate(generator, raw, scale, say)
    _rewrite(raw, building, scale, say, progress)
    shutil.rmtree(raw)
    stamp = os.path.join(building, _STAMP)
    with open(stamp + ".new", "w") as f:
        json.dump(want, f)
    os.replace(stamp + ".new", stamp)
    _move(building, directory)
    return directory


def _move(building: str, directory: str) -> None:
    """Move complete tables to their places, and the stamp last; a second call does what an interrupted one left."""
    left = [table for table in TABLES if os.path.lexists(os.path.join(building, table))]
    for table in left:
        place = os.path.join(directory, table)
        if os.path.lexists(place):  # not ours: what we have moved is not in `building` any more
            raise ValueError(
                f"{place} is not of this benchmark, which made a {table} of its own in {building}. "
                f"Remedy: another --data, or move {place} away"
            )
    for table in left:
        os.rename(os.path.join(building, table), os.path.join(directory, table))
    os.replace(os.path.join(building, _STAMP), os.path.join(directory, _STAMP))
    with contextlib.suppress(OSError):  # something was put there; the data is complete all the same
        os.rmdir(building)


def forget(directory: str) -> None:
    """Drop the files under `directory` from the page cache, so that they are next read from the disk.

    Raises
    ------
    RuntimeError
        The system cannot do that.
    """
    if not hasattr(os, "posix_fadvise"):
        raise RuntimeError("--cold needs posix_fadvise, which this system has not. Remedy: leave --cold out")
    for folder, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                # Pages that were never written back are not dropped.
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _generate(generator: str, raw: str, scale: float, say: Callable[[str], None]) -> None:
    """All tables in as many parts as the largest has; one call, because each spends a second on its pool of words."""
    n = max(parts(scale).values())
    say(f"generating TPC-H at scale {scale:g}")
    args = [generator, "parquet", "-q", "-s", f"{scale:g}", f"--parts={n}", f"--output-dir={raw}"]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")


def _generator() -> str:
    """Where ``tpchgen-cli`` is: beside this Python first, as a virtual environment need not be on PATH."""
    beside = os.path.join(sysconfig.get_path("scripts"), "tpchgen-cli")
    found = beside if os.path.exists(beside) else shutil.which("tpchgen-cli")
    if not found:
        raise RuntimeError(
            f"tpchgen-cli was found neither beside {sys.executable} nor on PATH. "
            "Remedy: pip install 'dask-gpurt[bench]'"
        )
    return found


def _rewrite(raw: str, directory: str, scale: float, say: Callable[[str], None], progress: Progress) -> None:
    jobs: list[tuple[list[str], str]] = []
    for table, wanted in parts(scale).items():
        os.makedirs(os.path.join(directory, table))
        # By number, not by name: part 10 must not follow part 1. For the same reason ours are zero-padded.
        names = sorted(os.listdir(os.path.join(raw, table)), key=lambda name: int(name.split(".")[1]))
        sources = [os.path.join(raw, table, name) for name in names]
        for i in range(wanted):
            share = sources[i * len(sources) // wanted : (i + 1) * len(sources) // wanted]
            jobs.append((share, os.path.join(directory, table, f"part.{i:05d}.parquet")))
    say(f"rewriting as {len(jobs)} parts with plain strings")
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as pool:
        try:
            for done, _ in enumerate(pool.map(lambda job: _rewrite_one(*job), jobs), 1):
                progress(done, len(jobs), "parts of the data")
        except BaseException:
            # Ctrl-C must not wait for parts that have not begun.
            pool.shutdown(cancel_futures=True)
            raise


def _rewrite_one(sources: list[str], target: str) -> None:
    table = pa.concat_tables([pq.read_table(source, use_threads=False) for source in sources])
    fields = [
        pa.field(f.name, pa.string() if f.type == pa.string_view() else f.type, nullable=f.nullable)
        for f in table.schema
    ]
    pq.write_table(table.cast(pa.schema(fields)), target, compression="snappy")
    for source in sources:
        os.remove(source)
