"""T7: limits of the container, and of Kubernetes, against what a worker counts on."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, na, ok
from dask_gpurt.doctor.gpu import AMD, NVIDIA, pci_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

_ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
_SECONDS = 2.0
_GPU = "nvidia.com/gpu"
#: resource -> vendor, and how its name and those of parts of a GPU begin, as of instances (MIG strategy "mixed")
_RESOURCES = {_GPU: (NVIDIA, (_GPU, "nvidia.com/mig-")), "amd.com/gpu": (AMD, ("amd.com/",))}
#: from here on a number of the kernel means "no limit"
_UNLIMITED = 1 << 60


def memory_limit(system: System) -> int | None:
    """Bytes that the cgroups around this process grant, the least of them; None: no limit."""
    limits = [
        limit
        for folder in system.cgroups("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := system.number(folder, name)) is not None and limit < _UNLIMITED
    ]
    return min(limits, default=None)


def _look(node: Node) -> Iterator[Verdict]:
    granted, wanted = memory_limit(node.system), node.memory_limit_bytes
    if granted is not None and wanted is not None and wanted > granted:
        yield fail(
            f"--memory-limit is {wanted / 1e9:.2f} GB, and the container may have {granted / 1e9:.2f} GB",
            expected="a limit of the worker below that of its container",
            meaning="The kernel ends the worker before it spills or pauses",
            remedy=f"--memory-limit {int(granted * 0.95)}, or a larger memory limit of the container",
        )
    elif granted is not None:
        yield ok(f"the container may have {granted / 1e9:.2f} GB")
    yield from _kubernetes(node)


def _kubernetes(node: Node) -> Iterator[Verdict]:
    token = node.system.text(_ACCOUNT, "token")
    if "KUBERNETES_SERVICE_HOST" not in node.environ or not token:
        yield na("not in Kubernetes, or without a service account")
        return
    namespace = node.system.text(_ACCOUNT, "namespace") or "default"
    pod = _ask(node, token, f"/api/v1/namespaces/{namespace}/pods/{node.environ.get('HOSTNAME', '')}")
    if isinstance(pod, str):
        yield na(f"the API server does not tell about this pod: {pod}")
        return
    limits = [c.get("resources", {}).get("limits", {}) for c in pod["spec"]["containers"]]
    # Which of the pod's containers this is is not known; with the MIG strategy "single" an instance is a GPU as well.
    asked = {int(limit.get(_GPU, 0)) for limit in limits} - {0}
    visible = sum(len(d.mig_uuids) if d.mig else 1 for d in node.gpu.look().devices)
    if asked and visible not in asked:
        yield fail(
            f"{node.gpu.prefix}the pod asks for {' and '.join(map(str, sorted(asked)))} {_GPU}, "
            f"and {visible} are visible in it",
            expected="as many",
            meaning="Workers share GPUs, or find none",
            remedy="the device plugin's log on that node; NVIDIA_VISIBLE_DEVICES must not be set by the image",
        )
    where = _ask(node, token, f"/api/v1/nodes/{pod['spec'].get('nodeName', '')}")
    if isinstance(where, str):
        yield na(f"the API server does not tell about this node: {where}")
        return
    allocatable = where["status"].get("allocatable", {})
    for resource, (vendor, names) in _RESOURCES.items():
        there = pci_devices(node.system, vendor)
        count = sum(int(n) for name, n in allocatable.items() if name.startswith(names))
        if there and not count:
            yield fail(
                f"{len(there)} GPUs on the PCI bus, and the node offers no {resource}",
                expected=f"{len(there)}",
                meaning="No pod gets a GPU of this node",
                remedy="the device plugin (its pod on this node and its log), then the driver",
            )
        elif there:
            yield ok(f"the node offers {count} {resource}")


def _ask(node: Node, token: str, path: str) -> dict[str, Any] | str:
    """An answer of the API server, or why there is none."""
    host, port = node.environ["KUBERNETES_SERVICE_HOST"], node.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(f"https://{host}:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    try:
        context = ssl.create_default_context(cafile=node.system.path(_ACCOUNT, "ca.crt"))
        # Never through a proxy: the token is for the API server alone.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(request, timeout=_SECONDS) as answer:
            tree: dict[str, Any] = json.load(answer)
            return tree
    except urllib.error.HTTPError as e:
        return f"HTTP {e.code}" + (" (the service account may not read it)" if e.code == 403 else "")
    except (OSError, ValueError) as e:
        return str(e)


CHECK = Check(
    id="T7",
    name="Container",
    looks_at="memory cgroup against --memory-limit; in Kubernetes what pod and node say of GPUs",
    fails_when="fail: a memory limit above the container's, other GPUs visible than the pod asks for, a node that "
    "offers none of its GPUs",
    remedy="--memory-limit, the device plugin",
    look=_look,
)
