"""Limits of the process, /dev/shm, swap, clock and certificates: real limits and mounts, real certificates."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.doctor import host
from dask_gpurt.doctor.certificates import end_of
from dask_gpurt.doctor.finding import State
from dask_gpurt.doctor.host import CHECKS

from .trees import Tree, alone, needs_namespaces, node, told

if TYPE_CHECKING:
    from pathlib import Path

LIMITS, SHM, SWAP, CLOCK, TLS = CHECKS
_CODE = """
from dask_gpurt.doctor.host import CHECKS
from tests.doctor.trees import node
for v in CHECKS[{index}].look(node()):
    print(v.state, v.found, "|", v.remedy)
"""


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("ulimit -n 300", "fail 300 files and sockets may be open (hard limit 300) | ulimit -n 65536"),
        ("ulimit -n 2000", "warn 2000 files and sockets may be open (hard limit 2000)"),
        ("ulimit -n 5000", "ok 5000 open files"),
        ("ulimit -f 1000", "fail files may have 512000 bytes (RLIMIT_FSIZE) | ulimit -f unlimited"),
    ],
)
def test_real_limits(command: str, text: str) -> None:
    assert text in alone(_CODE.format(index=0), before=command)


def test_locked_memory_beside_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    real = resource.getrlimit
    limited = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limited.get(which) or real(which))
    port = "sys/class/infiniband/mlx5_0/ports/1"
    tree = Tree(tmp_path, {f"{port}/link_layer": "InfiniBand\n"})
    assert any("65536 bytes may be locked" in v.found for v in told(LIMITS, node(tree), State.WARN))
    assert not any("locked" in v.found for v in LIMITS.look(node(Tree(tmp_path / "other", {"x": ""}))))
    # Who has IPC_LOCK is not bound by the limit; root in a user namespace has it not for this.
    for caps, bound in (("00000000a80425fb", True), ("00000000a80465fb", False)):
        status = {"proc/self/status": f"Name:\tpython\nCapEff:\t{caps}\n", "proc/self/uid_map": f" 0 0 {2**32 - 1}\n"}
        pod = Tree(tmp_path / caps, {f"{port}/link_layer": "InfiniBand\n", **status})
        assert any("locked" in v.found for v in LIMITS.look(node(pod))) is bound
        inside = Tree(tmp_path / caps, {"proc/self/uid_map": " 0 1000 1\n"})
        assert any("locked" in v.found for v in LIMITS.look(node(inside)))
    # RoCE is of no use without UCX, and is there with most cards.
    roce = Tree(tmp_path / "roce", {f"{port}/link_layer": "Ethernet\n"})
    for there in (False, True):
        monkeypatch.setattr(host, "ucx_installed", lambda there=there: there)
        assert any("locked" in v.found for v in LIMITS.look(node(roce))) is there


@needs_namespaces("-Urm")
def test_a_real_small_shm() -> None:
    got = alone(_CODE.format(index=1), before="mount -t tmpfs -o size=64m none /dev/shm", unshare="-Urm")
    assert got.startswith("warn /dev/shm has 64 MiB free | --shm-size 1g")


def test_no_shm(tmp_path: Path) -> None:
    (found,) = SHM.look(node(Tree(tmp_path, {})))
    assert found.state is State.WARN
    assert "No such file or directory" in found.found


@pytest.mark.parametrize(("pages", "state"), [(1000, State.WARN), (100, State.OK)])
def test_swapping(tmp_path: Path, pages: int, state: State) -> None:
    memory = {"proc/meminfo": "MemTotal: 9 kB\nSwapTotal: 4096000 kB\nSwapFree: 2048000 kB\n"}
    tree = Tree(
        tmp_path,
        {**memory, "proc/vmstat": "pswpin 10\npswpout 5\n"},
        {"proc/vmstat": f"pswpin 10\npswpout {5 + pages}\n"},
    )
    (found,) = SWAP.look(node(tree, window_seconds=1.0))
    assert found.state is state
    assert f"{pages} pages/s" in found.found
    assert "2000 MiB" in found.found


def test_swapping_is_not_told(tmp_path: Path) -> None:
    assert [v.state for v in SWAP.look(node(Tree(tmp_path, {})))] == [State.NA]


@pytest.mark.parametrize(
    ("seconds", "state"),
    [(None, State.NA), (0.05, State.OK), (-0.2, State.WARN), (0.2, State.WARN), (-3600.0, State.FAIL)],
)
def test_clock(seconds: float | None, state: State) -> None:
    assert [v.state for v in CLOCK.look(node(clock_seconds=seconds))] == [state]


def certificate(days: float) -> str:
    """A certificate that ends in so many days, in PEM format."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    end = datetime.now(UTC) + timedelta(days=days)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(end, datetime.now(UTC)) - timedelta(days=100))
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize(("days", "state"), [(400, State.OK), (13, State.WARN), (-2, State.FAIL), (365 * 40, State.OK)])
def test_certificates(tmp_path: Path, days: int, state: State) -> None:
    """In forty years a certificate's end is written in another way."""
    path = tmp_path / "cert.pem"
    pem = certificate(days)
    path.write_text("some text before\n" + certificate(days + 100) + pem)
    assert end_of(str(path)) == end_of(pem) == pytest.approx(time.time() + days * 86400, abs=60)
    (found,) = TLS.look(node(certificates=(str(path),)))
    assert found.state is state
    assert str(path) in found.found
    (found,) = TLS.look(node(certificates=(pem,)))
    assert found.state is state
    assert "the certificate in the configuration" in found.found


@pytest.mark.parametrize(
    ("first", "second", "state"), [(-2, 400, State.OK), (3, 400, State.OK), (-2, 5, State.WARN), (-9, -2, State.FAIL)]
)
def test_authorities_that_change(tmp_path: Path, first: int, second: int, state: State) -> None:
    """A file with the old one and the new, as all systems' bundles have them too."""
    path = tmp_path / "ca.pem"
    path.write_text(certificate(first) + certificate(second))
    assert [v.state for v in TLS.look(node(authorities=(str(path),)))] == [state]
    both = [v.state for v in TLS.look(node(authorities=(str(path),), certificates=(certificate(100),)))]
    assert both == [state, State.OK]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
    ],
)
def test_a_file_that_is_no_certificate(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cert.pem"
    path.write_text(text)
    (found,) = TLS.look(node(certificates=(str(path),)))
    assert found.state is State.FAIL
    assert f"{path} cannot be read: " in found.found


def test_a_certificate_that_is_not_there(tmp_path: Path) -> None:
    (found,) = TLS.look(node(certificates=(str(tmp_path / "none.pem"),)))
    assert found.state is State.FAIL
    assert [v.state for v in TLS.look(node())] == [State.NA]
