"""T10: the network card: what UCX is told to use, what there is, and whether an active InfiniBand port is used."""

from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING

import psutil

from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, na, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

_CARDS = "sys/class/infiniband"
#: values of UCX_TLS with which verbs are used
_VERBS = {"all", "rc", "rc_x", "rc_v", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_x", "ud_v", "ib"}


def ucx_installed() -> bool:
    """Whether any of the wheels of ucxx is here."""
    return any(re.fullmatch(r"ucxx(-cu\d+)?", d.name or "") for d in importlib.metadata.distributions())


def _ports(system: System) -> dict[str, bool]:
    """``mlx5_0:1`` -> whether the port is active."""
    return {
        f"{card}:{port}": "ACTIVE" in (system.text(_CARDS, card, "ports", port, "state") or "")
        for card in system.names(_CARDS)
        for port in system.names(_CARDS, card, "ports")
    }


def is_infiniband(system: System, card: str, port: str) -> bool:
    """Not RoCE: that is a card for Ethernet, as most are, and takes a network that was set up for it."""
    return system.text(_CARDS, card, "ports", port, "link_layer") != "Ethernet"


def _look(node: Node) -> Iterator[Verdict]:
    ports = _ports(node.system)
    active = [name for name, on in ports.items() if on and is_infiniband(node.system, *name.split(":"))]
    yield from _judge_devices(node.environ.get("UCX_NET_DEVICES", "all"), ports)
    transports = node.environ.get("UCX_TLS", "all")
    names = {word.strip() for word in transports.lstrip("^").split(",")}
    used = not (names & {"ib", "rc", "all"}) if transports.startswith("^") else bool(names & _VERBS)
    if active and (not used or not ucx_installed()):
        reason = f"UCX_TLS is {transports}" if not used else "ucxx is not installed"
        yield warn(
            f"InfiniBand ports {', '.join(active)} are active, and {reason}",
            expected="transfers over InfiniBand",
            meaning="Transfers go through TCP, which takes more of the processors and a part of the card's speed",
            remedy="unset UCX_TLS, or UCX_TLS=all" if not used else "pip install 'dask-gpurt[ucx]'",
        )
    elif active:
        yield ok(f"active: {', '.join(active)}")
    else:
        yield na("no active InfiniBand port")


def _judge_devices(setting: str, ports: dict[str, bool]) -> Iterator[Verdict]:
    """UCX_NET_DEVICES: names with or without a port, the prefix ^ to leave out, or all."""
    excludes = setting.startswith("^")  # such as a port that is down: that it is, is no fault
    wanted = [] if excludes else [word.strip() for word in setting.split(",") if word.strip()]
    interfaces = psutil.net_if_stats()
    up = {**ports, **{name: stats.isup for name, stats in interfaces.items()}, "all": True}
    for name, on in ports.items():  # a card without a port stands for all of its ports
        up[name.partition(":")[0]] = on or up.get(name.partition(":")[0], False)
    missing = [name for name in wanted if name not in up]
    allowed = ", ".join(sorted({*ports, *interfaces})) or "none"
    if missing:
        yield fail(
            f"UCX_NET_DEVICES={setting}, and there is no {', '.join(missing)}",
            expected=f"some of: {allowed}",
            meaning="UCX reaches no peer on another host through a device that is not there",
            remedy="unset UCX_NET_DEVICES, or name devices of this machine",
        )
    elif down := [name for name in wanted if not up[name]]:
        yield fail(
            f"UCX_NET_DEVICES={setting}, and the port of {', '.join(down)} is not active",
            expected="an active port",
            meaning="UCX reaches no peer on another host through it",
            remedy="the cable and the subnet manager (ibstat), or another device",
        )
    elif excludes:
        yield ok(f"UCX_NET_DEVICES={setting} leaves those out")
    elif setting != "all":
        yield ok(f"UCX_NET_DEVICES={setting} is there")


CHECK = Check(
    id="T10",
    name="NIC",
    looks_at="UCX_NET_DEVICES, UCX_TLS, /sys/class/infiniband; of a cluster, the interface that workers listen on",
    fails_when="fail: a device that is not there or not active, loopback among several hosts; warn: an active "
    "InfiniBand port that UCX does not use",
    remedy="UCX_NET_DEVICES, UCX_TLS, --interface",
    look=_look,
    once_per_host=True,
)
