"""T13, with a FIFO as the kernel's log. No GPU was used."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.doctor.finding import State
from dask_gpurt.doctor.xid import CHECK

from .trees import Tree, node

if TYPE_CHECKING:
    from pathlib import Path

PCI = {
    "sys/bus/pci/devices/0000:3b:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:3b:00.0/class": "0x030200\n",
    "proc/uptime": "100000.5 1.0\n",
}


def xid(number: int, seconds: float = 99_000, device: str = "0000:3b:00") -> str:
    text = f"4,1707,{int(seconds * 1e6)},-;NVRM: Xid (PCI:{device}): {number}, pid=2412, name=python, Ch 00000008\n"
    return text + " SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"


def told(root: Path, log: str) -> list[tuple[State, str]]:
    """What is said of a log that a FIFO holds, as /dev/kmsg does: a reader waits at its end."""
    tree = Tree(root, PCI)
    (root / "dev").mkdir()
    path = root / "dev" / "kmsg"
    os.mkfifo(path)
    opened, done = threading.Event(), threading.Event()

    def write() -> None:
        fd = os.open(path, os.O_RDWR)  # does not wait for a reader
        os.write(fd, log.encode())
        opened.set()
        done.wait(60)
        os.close(fd)

    writer = threading.Thread(target=write)
    writer.start()
    opened.wait(10)
    try:
        return [(v.state, v.found) for v in CHECK.look(node(tree))]
    finally:
        done.set()
        writer.join()


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("6,1,5000000,-;usb 1-1: new device\n", [(State.OK, "no Xid in the last day")]),
        (xid(31), [(State.WARN, "Xid 31 of 0000:3b:00, 1 times in the last day")]),
        (xid(79) + xid(79), [(State.FAIL, "Xid 79 of 0000:3b:00, 2 times in the last day")]),
        (xid(95, device="0000:3b:00 GPU-I:05"), [(State.FAIL, "Xid 95 of 0000:3b:00, 1 times in the last day")]),
        (
            xid(13, device="0000:3b:00 GPU-I:05 GPU-CI:00"),
            [(State.WARN, "Xid 13 of 0000:3b:00, 1 times in the last day")],
        ),
        (xid(4242), [(State.FAIL, "Xid 4242 of 0000:3b:00, 1 times in the last day")]),
        (xid(79, seconds=100), [(State.OK, "no Xid in the last day")]),  # the day before
        (
            xid(13) + "6,2,7,-;other\n" + xid(48, device="0000:5e:00"),
            [
                (State.WARN, "Xid 13 of 0000:3b:00, 1 times in the last day"),
                (State.FAIL, "Xid 48 of 0000:5e:00, 1 times in the last day"),
            ],
        ),
    ],
)
def test_errors_in_the_log(tmp_path: Path, log: str, expected: list[tuple[State, str]]) -> None:
    assert told(tmp_path, log) == expected


def test_the_newest_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = iter([b"6,1,5000000,-;usb 1-1: new device\n"] * 30_000 + [xid(79).encode()])

    class System:
        """With a log of one record a read, as the kernel's."""

        open, close, O_RDONLY, O_NONBLOCK, O_CLOEXEC = lambda *_: 0, lambda _: None, 0, 0, 0

        @staticmethod
        def read(fd: int, nbytes: int) -> bytes:
            return next(records, b"")

    monkeypatch.setattr("dask_gpurt.doctor.xid.os", System)
    (found,) = CHECK.look(node(Tree(tmp_path, PCI)))
    assert (found.state, found.found) == (State.FAIL, "Xid 79 of 0000:3b:00, 1 times in the last day")


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    (found,) = CHECK.look(node(Tree(tmp_path, PCI)))
    assert (found.state, found.found) == (State.NA, "the kernel's log cannot be read: No such file or directory")
    assert [v.state for v in CHECK.look(node(Tree(tmp_path / "none", {})))] == [State.NA]


def test_the_log_of_this_machine(tmp_path: Path) -> None:
    """The real one, where it can be read: records of the kernel are read to their end, and none is waited for."""
    tree = Tree(tmp_path, PCI)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kmsg").symlink_to("/dev/kmsg")
    assert {v.state for v in CHECK.look(node(tree))} <= set(State)
