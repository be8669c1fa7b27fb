"""What a trace holds, in a few lines of text."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from dask.utils import format_bytes

if TYPE_CHECKING:
    from dask_gpurt.observe.trace.reader import Trace

#: prefixes listed
LISTED = 12


def summary(trace: Trace) -> str:
    """Several lines, without a newline at the end."""
    ran = [t for t in trace.tasks.values() if t.runs]
    threads = sum(w.threads for w in trace.workers.values())
    busy = sum(t.compute_seconds or 0.0 for t in ran)
    span = trace.makespan_seconds()
    transfers = [x for t in ran for x in t.transfers]
    reads = sum(stop - start for t in ran for start, stop in t.disk_reads)
    versions = ", ".join(f"{name} {version}" for name, version in trace.about.get("versions", {}).items())
    lines = [
        f"{trace.path}: policy {trace.about.get('config', {}).get('policy', 'unknown')}; {versions}",
        f"  workers   {len(trace.workers)} with {threads} threads",
        (
            f"  graphs    {len(trace.graphs)}, {len(trace.tasks):,} tasks, {len(ran):,} finished, "
            f"{sum(t.erred is not None for t in trace.tasks.values())} failed, "
            f"{sum(max(t.runs - 1, 0) for t in ran)} run again"
        ),
        f"  time      {span:.3f} s from the first graph to the last result; threads were busy "
        + (f"{busy / (span * threads):.0%} of it" if span > 0 and threads else "0 s"),
        f"  results   {format_bytes(sum(t.nbytes or 0 for t in ran))}",
        (
            f"  transfers {len(transfers):,}, {sum(x.stop_seconds - x.start_seconds for x in transfers):.3f} s; "
            f"reads of spilled inputs {reads:.3f} s"
        ),
    ]
    if trace.lost_records:
        lines.append(f"  LOST      {trace.lost_records:,} records: the disk was slower than the run, or the file full")
    if trace.damage:
        lines.append(f"  DAMAGED   {trace.damage}")
    seconds: dict[str, list[float]] = defaultdict(list)
    for t in ran:
        seconds[t.prefix].append(t.compute_seconds or 0.0)
    for prefix, values in sorted(seconds.items(), key=lambda item: -sum(item[1]))[:LISTED]:
        lines.append(f"  {sum(values):10.3f} s  {len(values):7,} x {prefix}")
    return "\n".join(lines)
