"""T6: whether this process gets the processors that it counts on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

#: shares of periods in which a group was stopped
_THROTTLED_WARN, _THROTTLED_FAIL = 0.05, 0.25
#: periods below which a share says nothing
_PERIODS = 10
_STEAL = 0.10
#: share of its highest frequency that a processor may run at
_FREQUENCY = 0.8


def quota(system: System) -> float | None:
    """Processors that the cgroups around this process grant, the least of them; None: no limit."""
    out: list[float] = []
    for folder in system.cgroups("cpu"):
        words = (system.text(folder, "cpu.max") or "").split()
        if not words:
            words = [system.text(folder, "cpu.cfs_quota_us") or "", system.text(folder, "cpu.cfs_period_us") or ""]
        if len(words) == 2 and all(word.isdigit() for word in words):
            out.append(int(words[0]) / int(words[1]))
    return min(out, default=None)


def _throttled(system: System) -> dict[str, tuple[int, int]]:
    """By group: periods and those in which it was stopped."""
    out = {}
    for folder in system.cgroups("cpu"):
        stat = system.fields(folder, "cpu.stat")
        if "nr_periods" in stat:
            out[folder] = stat["nr_periods"], stat.get("nr_throttled", 0)
    return out


def _ticks(system: System) -> tuple[int, int]:
    """Time of all processors, and what of it the host kept for others, in clock ticks."""
    words = (system.text("proc/stat") or "").partition("\n")[0].split()[1:9]
    ticks = [int(word) for word in words]
    return sum(ticks), ticks[7] if len(ticks) > 7 else 0


def _hot(system: System) -> int:
    """How often processors were slowed because of heat."""
    folder = "sys/devices/system/cpu"
    names = [name for name in system.names(folder) if name[3:].isdigit()]
    return sum(system.number(folder, name, "thermal_throttle/core_throttle_count") or 0 for name in names)


def _look(node: Node) -> Iterator[Verdict]:
    system = node.system
    before, ticks_before, hot_before = _throttled(system), _ticks(system), _hot(system)
    system.wait(node.window_seconds)
    yield from _judge_throttling(before, _throttled(system))
    (total, steal), hot = _ticks(system), _hot(system) - hot_before
    share = (steal - ticks_before[1]) / max(1, total - ticks_before[0])
    if share > _STEAL:
        yield warn(
            f"the host keeps {share:.0%} of this machine's processors for others",
            expected=f"at most {_STEAL:.0%} steal",
            meaning="Tasks take longer here, and not always equally long",
            remedy="a machine type with processors of its own, or fewer virtual machines on that host",
        )
    if hot > 0:
        yield warn(
            f"processors were slowed {hot} times because of heat in {node.window_seconds:g} s",
            expected="none",
            meaning="Tasks take longer here",
            remedy="cooling; drain this node meanwhile",
        )
    yield from _frequency(system)
    yield from _threads(node)
    pressure = (system.text("proc/pressure/cpu") or "").partition("\n")[0]
    yield ok(f"steal {share:.1%}" + (f", PSI {pressure}" if pressure else ""))


def _judge_throttling(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> Iterator[Verdict]:
    """The worst group, in the window or since it was made."""
    worst, text = 0.0, ""
    for folder, (periods, stopped) in after.items():
        first_periods, first_stopped = before.get(folder, (0, 0))
        for n, k in ((periods, stopped), (periods - first_periods, stopped - first_stopped)):
            if n >= _PERIODS and k / n > worst:
                worst, text = k / n, f"stopped in {k} of {n} periods by the quota of {folder}"
    if worst <= _THROTTLED_WARN:
        yield ok(text or "not stopped by a quota")
        return
    make = fail if worst > _THROTTLED_FAIL else warn
    yield make(
        text,
        expected=f"at most {_THROTTLED_WARN:.0%} of periods",
        meaning="The process stands still for parts of each period, its event loop too: heartbeats and transfers wait",
        remedy="a larger CPU limit of the container, or fewer threads (--nthreads)",
    )


def _frequency(system: System) -> Iterator[Verdict]:
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    allowed, most = system.number(folder, "scaling_max_freq"), system.number(folder, "cpuinfo_max_freq")
    # acpi-cpufreq, as on many EPYCs, takes frequencies of a table only. From the highest one there the processor
    # boosts by itself, and cpuinfo_max_freq is what it reaches so.
    table = [int(word) for word in (system.text(folder, "scaling_available_frequencies") or "").split()]
    if table and system.number("sys/devices/system/cpu/cpufreq/boost") == 1:
        most = max(table)
    if allowed and most and allowed < _FREQUENCY * most:
        yield warn(
            f"processors are limited to {allowed / 1e6:.1f} of {most / 1e6:.1f} GHz",
            expected=f"at least {_FREQUENCY:.0%}",
            meaning="Tasks take longer here",
            remedy="cpupower frequency-set --max, or the BIOS's power limit",
        )


def _threads(node: Node) -> Iterator[Verdict]:
    granted = quota(node.system)
    if node.threads is None or granted is None:
        return
    if node.threads > granted + 0.5:
        yield warn(
            f"{node.threads} threads, and a quota of {granted:.3g} processors",
            expected="no more threads than processors",
            meaning="Threads wait for each other, and the quota stops all of them, the event loop too",
            remedy=f"--nthreads {max(1, int(granted))}, or a larger CPU limit",
        )
    else:
        yield ok(f"{node.threads} threads on a quota of {granted:.3g} processors")


CHECK = Check(
    id="T6",
    name="CPU",
    looks_at="cgroup cpu.stat (v1, v2), quota, steal in /proc/stat, thermal_throttle, cpufreq, PSI",
    fails_when="fail: more than 25 % of periods throttled; warn: more than 5 %, steal above 10 %, more threads than "
    "the quota, slowed by heat, frequency capped below 80 %",
    remedy="a larger CPU limit, or fewer threads",
    look=_look,
)
