"""Findings about a cluster: those of its workers, grouped, and what only a comparison of workers can tell."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import TYPE_CHECKING, Any

from distributed.comm import get_address_host

from dask_gpurt.doctor.finding import Finding, State, fail, ok
from dask_gpurt.doctor.network import Interface, agree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from dask_gpurt.doctor.finding import Verdict

_ENCRYPTED = ("tls", "wss")
_PROBLEMS = (State.WARN, State.FAIL)


def grouped(findings: Mapping[str, Sequence[Finding]], of_host: Collection[str] = ()) -> list[Finding]:
    """One finding for all workers that say the same.

    Parameters
    ----------
    findings
        By the worker's address.
    of_host
        Ids of checks that one worker makes for its host.
    """
    groups: dict[tuple[str, State, str], list[tuple[str, Finding]]] = {}
    answered: dict[str, set[str]] = {}
    for address, found in findings.items():
        for f in found:
            groups.setdefault((f.id, f.state, f.meaning), []).append((address, f))
            answered.setdefault(f.id, set()).add(address)
    bad = {id for id, state, _ in groups if state in _PROBLEMS}
    out = []
    for (id, state, _), members in groups.items():
        if id in bad and state not in _PROBLEMS:
            continue  # the line about the problem says how many have it
        workers = tuple(dict.fromkeys(address for address, _ in members))
        first = members[0][1]
        others = len({f.found for _, f in members}) - 1
        more = f" ({others} more, in other words or figures)" if others else ""
        text = f"{len(workers)} of {len(answered[id])} {'hosts' if id in of_host else 'workers'}: {first.found}{more}"
        seconds = max(f.seconds for _, f in members)
        out.append(dataclasses.replace(first, found=text, seconds=seconds, workers=workers))
    longest = max(findings.values(), key=len, default=())
    order = {id: i for i, id in enumerate(dict.fromkeys([*(f.id for f in longest), *answered]))}
    return sorted(out, key=lambda f: order[f.id])


def compared(
    facts: Mapping[str, Mapping[str, Any]],
    stacks: Mapping[str, Mapping[str, str]],
    addresses: Iterable[str],
    seconds: float,
) -> list[Finding]:
    """What the workers' facts say together.

    Parameters
    ----------
    facts
        By a worker's address, as `dask_gpurt.doctor.worker.facts` makes them.
    stacks
        By address, the scheduler's too: name to version.
    addresses
        Of the scheduler, workers and nannies.
    """
    hosts = {str(f["host"]): f for f in facts.values()}
    found = [Interface(**{**i, "host": host}) for host, f in hosts.items() for i in f["interfaces"]]
    parts = (
        ("T10", "NIC", _loopback(list(facts), len(hosts))),
        ("T12", "Network", agree(_between_workers(found, facts)) if len(hosts) > 1 else ()),
        ("T15", "MIG", _shared_instances(facts)),
        ("stack", "Versions", _stack(stacks)),
        ("tls", "TLS", _schemes(addresses)),
    )
    return [Finding.of(id, name, verdict, seconds) for id, name, verdicts in parts for verdict in verdicts]


def _between_workers(found: Sequence[Interface], addresses: Iterable[str]) -> list[Interface]:
    """Those in a network that workers listen in. Bridges of containers and machines (docker0, virbr0) have the same
    subnet on each host, and are one network with none of the others."""
    try:
        hosts = [ipaddress.ip_address(get_address_host(a)) for a in addresses]
    except ValueError:  # a name, which may stand for any
        return list(found)
    return [i for i in found if any(host in ipaddress.ip_network(i.subnet) for host in hosts)]


def _loopback(addresses: Sequence[str], hosts: int) -> Iterator[Verdict]:
    lonely = [a for a in addresses if a.partition("://")[2].startswith(("127.", "[::1]", "localhost"))]
    if hosts > 1 and lonely:
        yield fail(
            f"{len(lonely)} of {len(addresses)} workers listen on loopback, such as {lonely[0]}, on {hosts} hosts",
            expected="an address that the other hosts reach",
            meaning="Workers elsewhere fetch from themselves, or from nobody: tasks fail or hang",
            remedy="--interface or --host of dask worker, or an entry for the host's name that is not 127.0.0.1",
        )


def _shared_instances(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Verdict]:
    users: dict[tuple[str, str], list[str]] = {}
    for address, f in facts.items():
        if f["gpu"].startswith("MIG-"):
            users.setdefault((f["host"], f["gpu"]), []).append(address)
    for (host, instance), workers in users.items():
        if len(workers) > 1:
            yield fail(
                f"{len(workers)} workers of {host} share {instance}: {', '.join(workers)}",
                expected="an instance for each worker",
                meaning="They wait for each other, and each counts on the memory of the whole instance",
                remedy="CUDA_VISIBLE_DEVICES with another UUID of nvidia-smi -L for each worker",
            )


def _stack(stacks: Mapping[str, Mapping[str, str]]) -> Iterator[Verdict]:
    """Versions by which processes differ; one that lacks something differs too."""
    names = sorted({name for versions in stacks.values() for name in versions})
    differ = False
    for name in names:
        having: dict[str, list[str]] = {}
        for address, versions in stacks.items():
            having.setdefault(versions.get(name, "not installed"), []).append(address)
        if len(having) > 1:
            differ = True
            most = max(having, key=lambda version: len(having[version]))
            yield fail(
                f"{name}: " + ", ".join(f"{v} on {len(a)} (such as {a[0]})" for v, a in sorted(having.items())),
                expected="one version on the scheduler and all workers",
                meaning="Values and messages may not be understood by another process, or have other contents there",
                remedy=f"pip install {name}=={most}, or the same image for all"
                if most != "not installed" and name != "python"
                else "the same environment or image for all",
            )
    if not differ:
        yield ok(f"{len(stacks)} processes have the same versions")


def _schemes(addresses: Iterable[str]) -> Iterator[Verdict]:
    known = sorted({a for a in addresses if "://" in a})
    secret = [a for a in known if a.partition("://")[0] in _ENCRYPTED]
    plain = [a for a in known if a not in secret and not a.startswith("inproc://")]
    if secret and plain:
        yield fail(
            f"{len(secret)} addresses are encrypted (such as {secret[0]}), {len(plain)} are not (such as {plain[0]})",
            expected="all or none",
            meaning="Values of tasks travel unencrypted, and whoever reaches such a port may run code",
            remedy="--protocol tls for the scheduler and all workers, and distributed.comm.require-encryption: true",
        )
