"""Verdicts on what a worker reported, beside what others did. Pure.

Evidence that may be another's fault is a warning. A peer that cannot be reached may itself be ill, so a worker fails
only when it reached none of several. A time is compared only with those of workers of the same class, and only where
there are enough of them.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from dask_gpurt.preflight.checks import Finding, State

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping

#: times the median of its class, from which a worker is slow
SLOW = 2.0
#: other workers of the class, from which a slow one fails
MEMBERS = 3
#: times that a slow worker may compute again
ATTEMPTS = 3
#: packages whose versions have to be the same in a cluster; of the rest of the stack a difference is seldom a fault
SAME = ("dask-gpurt", "python", "dask", "distributed", "numpy", "pandas", "pyarrow")


def speed(own_seconds: float, others: Collection[float]) -> Finding:
    """Whether a worker computes as fast as others of its class.

    Parameters
    ----------
    own_seconds
        Its shortest time.
    others
        Those of the other workers of its class.
    """
    if not others:
        return Finding("speed", State.NONE, "no other worker of its class has been measured", seconds=own_seconds)
    median = statistics.median(others)
    if own_seconds <= SLOW * median:
        return Finding("speed", State.OK, seconds=own_seconds)
    return Finding(
        "speed",
        State.FAIL if len(others) >= MEMBERS else State.WARN,
        f"{own_seconds:.3g} s for the known computation",
        f"at most {SLOW * median:.3g} s, {SLOW:g} times the median of {len(others)} workers of its class",
        "look at its CPU limit (cpu.max), clock (cpufreq, thermal throttling) and frozen or stopped processes",
        own_seconds,
    )


def peers(probes: Mapping[str, Mapping[str, Any]], present: Collection[str]) -> Finding:
    """Whether a worker reaches others.

    Parameters
    ----------
    probes
        Address to ``{"seconds", "bytes_per_second"}``, or ``{"error"}``.
    present
        Addresses that are still in the cluster; what was found of others says nothing.
    """
    told = {address: probe for address, probe in probes.items() if address in present}
    failed = {address: str(probe["error"]) for address, probe in told.items() if "error" in probe}
    if not told:
        return Finding("peers", State.NONE)
    seconds = sum(float(probe.get("seconds", 0.0)) for probe in told.values())
    if not failed:
        return Finding("peers", State.OK, seconds=seconds)
    return Finding(
        "peers",
        State.FAIL if len(failed) == len(told) >= 2 else State.WARN,
        "; ".join(f"{address} ({why})" for address, why in failed.items()),
        f"an answer of each of {len(told)} workers",
        "look at the firewall, the routes and the interface (--interface, --contact-address) of both",
        seconds,
    )


def stack(own: Mapping[str, str], scheduler: Mapping[str, str]) -> Finding:
    """Whether a worker runs what the scheduler runs."""
    both = [name for name in SAME if name in own and name in scheduler]
    differ = {name: (own[name], scheduler[name]) for name in both if own[name] != scheduler[name]}
    if not differ:
        return Finding("stack", State.OK)
    return Finding(
        "stack",
        State.WARN,
        ", ".join(f"{name} {mine}" for name, (mine, _) in differ.items()),
        ", ".join(f"{name} {theirs}" for name, (_, theirs) in differ.items()) + " as on the scheduler",
        "install the same versions everywhere",
    )


def choose_peers(host: str, hosts: Mapping[str, str], draw: random.Random) -> list[str]:
    """At most four peers to probe: one on the same host, one on another, and two of the rest, by lot.

    Parameters
    ----------
    host
        Of the worker that probes.
    hosts
        Address of each peer -> its host.
    """
    near = [peer for peer, at in hosts.items() if at == host]
    far = [peer for peer, at in hosts.items() if at != host]
    chosen = [draw.choice(some) for some in (near, far) if some]
    lot = draw.sample(list(hosts), min(4, len(hosts)))
    return chosen + [peer for peer in lot if peer not in chosen][:2]
