"""T7: an API server over TLS with recorded objects; memory limits by a real cgroup where one can be made."""

from __future__ import annotations

import http.server
import ipaddress
import json
import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.backends.nvml import Device, Snapshot
from dask_gpurt.doctor.container import CHECK, memory_limit
from dask_gpurt.doctor.finding import State

from .trees import Gpus, Tree, inside, node, real_cgroup, told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
PCI = {
    "sys/bus/pci/devices/0000:3b:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:3b:00.0/class": "0x030200\n",
}
GPU = Gpus(Snapshot(devices=(Device(0, "GPU-a", "H200", "0000:3b:00.0"),)))
POD = "/api/v1/namespaces/team/pods/worker-7"
NODE = "/api/v1/nodes/gpu-node-1"


def objects(limit: str | None = "1", allocatable: str | None = "8") -> dict[str, Any]:
    """Of one pod and its node, as the API server gives them, shortened."""
    limits = {} if limit is None else {"nvidia.com/gpu": limit, "memory": "64Gi"}
    offered = {} if allocatable is None else {"nvidia.com/gpu": allocatable}
    return {
        POD: {"spec": {"nodeName": "gpu-node-1", "containers": [{"resources": {"limits": limits}}, {"name": "log"}]}},
        NODE: {"status": {"allocatable": {"cpu": "64", **offered}}},
    }


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, with its key in the same file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "api.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return path


@contextmanager
def api_server(certificate: Path, tree: dict[str, Any]) -> Iterator[int]:
    """Its port. Whoever has no token gets 401; what is not in the tree is forbidden."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer secret"
            body = json.dumps(tree.get(self.path)).encode()
            self.send_response(200 if known and self.path in tree else 403 if known else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def look(tmp_path: Path, certificate: Path, tree: dict[str, Any], gpu: Gpus = GPU, token: str = "secret") -> list[str]:
    files = {f"{ACCOUNT}/token": token, f"{ACCOUNT}/namespace": "team", f"{ACCOUNT}/ca.crt": certificate.read_text()}
    with api_server(certificate, tree) as port:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port), "HOSTNAME": "worker-7"}
        about = node(Tree(tmp_path, {**PCI, **files}), gpu=gpu, environ=environ)
        return [f"{v.state} {v.found}" for v in CHECK.look(about)]


def test_a_pod_and_its_node(tmp_path: Path, certificate: Path) -> None:
    assert look(tmp_path, certificate, objects()) == ["ok the node offers 8 nvidia.com/gpu"]


@pytest.mark.parametrize(
    ("tree", "gpu", "text"),
    [
        (objects(limit="2"), GPU, "fail recorded: the pod asks for 2 nvidia.com/gpu, and 1 are visible in it"),
        (
            objects(),
            Gpus(Snapshot("none")),
            "fail recorded: the pod asks for 1 nvidia.com/gpu, and 0 are visible in it",
        ),
        (objects(None, None), GPU, "fail 1 GPUs on the PCI bus, and the node offers no nvidia.com/gpu"),
        (objects(None, "0"), GPU, "fail 1 GPUs on the PCI bus, and the node offers no nvidia.com/gpu"),
        (
            {POD: objects()[POD]},
            GPU,
            "n/a the API server does not tell about this node: HTTP 403 (the service account may not read it)",
        ),
    ],
)
def test_what_is_wrong(tmp_path: Path, certificate: Path, tree: dict[str, Any], gpu: Gpus, text: str) -> None:
    assert text in look(tmp_path, certificate, tree, gpu)


def test_a_partitioned_gpu(tmp_path: Path, certificate: Path) -> None:
    """An instance is a GPU to Kubernetes (strategy "single"), or has a name of its own ("mixed")."""
    device = Device(0, "GPU-a", "H200", "0000:3b:00.0", mig=True, mig_uuids=("MIG-1", "MIG-2"))
    gpu = Gpus(Snapshot(devices=(device,)))
    assert look(tmp_path / "single", certificate, objects("2", "7"), gpu) == ["ok the node offers 7 nvidia.com/gpu"]
    mixed = objects(None, "0")
    mixed[NODE]["status"]["allocatable"] |= {"nvidia.com/mig-1g.18gb": "5", "nvidia.com/mig-2g.35gb": "1"}
    assert look(tmp_path / "mixed", certificate, mixed, gpu) == ["ok the node offers 6 nvidia.com/gpu"]


def test_a_pod_of_two_containers_with_gpus(tmp_path: Path, certificate: Path) -> None:
    tree = objects("1", "8")
    tree[POD]["spec"]["containers"][1]["resources"] = {"limits": {"nvidia.com/gpu": "2"}}
    assert look(tmp_path / "one", certificate, tree) == ["ok the node offers 8 nvidia.com/gpu"]
    found = look(tmp_path / "none", certificate, tree, Gpus(Snapshot("none")))
    assert found[0] == "fail recorded: the pod asks for 1 and 2 nvidia.com/gpu, and 0 are visible in it"


def test_an_api_server_that_does_not_tell(tmp_path: Path, certificate: Path) -> None:
    (found,) = look(tmp_path / "a", certificate, objects(), token="other")
    assert found == "n/a the API server does not tell about this pod: HTTP 401"
    files = {f"{ACCOUNT}/token": "secret"}
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1", "HOSTNAME": "worker-7"}
    (found_,) = CHECK.look(node(Tree(tmp_path / "b", files), environ=environ))
    assert found_.state is State.NA
    assert "does not tell about this pod" in found_.found


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/p\n", "sys/fs/cgroup/p/memory.max": "1000\n"}, 1000),
        ({"proc/self/cgroup": "0::/p\n", "sys/fs/cgroup/p/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "3:memory:/p\n",
                "sys/fs/cgroup/memory/p/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
            },
            2000,
        ),
    ],
)
def test_the_limit_of_the_container(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    tree = Tree(tmp_path, files)
    assert memory_limit(tree) == limit
    assert bool(told(CHECK, node(tree, memory_limit_bytes=2001), State.FAIL)) is (limit is not None)
    assert not told(CHECK, node(tree, memory_limit_bytes=900), State.FAIL)


_CODE = """
from dask_gpurt.doctor.container import CHECK
from tests.doctor.trees import node
for v in CHECK.look(node(memory_limit_bytes=4_000_000_000)):
    print(v.state, v.found, "|", v.remedy)
"""


def test_a_real_limit() -> None:
    with real_cgroup("memory", ("memory.limit_in_bytes", "memory.max"), "2000003072") as group:
        out = inside(group, _CODE)
    assert "fail --memory-limit is 4.00 GB, and the container may have 2.00 GB | --memory-limit 19" in out
