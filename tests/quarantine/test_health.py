"""What a worker tells of its peers, its disk and its cards, with a FIFO as the kernel's log. No GPU was used."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from dask_gpurt.backends.system import System
from dask_gpurt.quarantine import worker
from dask_gpurt.quarantine.worker import Health
from tests.doctor.test_xid import PCI, xid
from tests.doctor.trees import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


def test_nothing_to_say_takes_no_room() -> None:
    health = Health(lambda: {"tcp://a": 0}, lambda: {"ENOSPC": 7, "unpicklable": 3})
    assert health.heartbeat() == {}


def test_what_there_is_is_told() -> None:
    health = Health(lambda: {"tcp://a": 2}, lambda: {"EIO": 2, "checksum": 1, "ENOSPC": 9})
    assert health.heartbeat() == {"health": {"corrupt": {"tcp://a": 2}, "disk": 3}}
    assert Health(dict, dict, lambda: "by heat").heartbeat() == {"health": {"clocks": "by heat"}}


@contextlib.contextmanager
def log(root: Path) -> Iterator[int]:
    """A machine with a card; yields what the driver writes into."""
    Tree(root, PCI)
    (root / "dev").mkdir()
    os.mkfifo(root / "dev" / "kmsg")
    fd = os.open(root / "dev" / "kmsg", os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


async def _told(health: Health, expected: str | None) -> bool:
    for _ in range(200):
        if health.heartbeat().get("health", {}).get("hardware") == expected:
            return True
        await asyncio.sleep(0.02)
    return False


async def _watch(root: Path, written: list[str], expected: str) -> None:
    with log(root) as kmsg:
        health = Health(dict, dict, system=System(str(root)))
        health.start({})
        try:
            await asyncio.sleep(0.05)
            for text in written:
                assert health.heartbeat() == {}
                os.write(kmsg, text.encode())
                await asyncio.sleep(0.1)
            assert await _told(health, expected)
        finally:
            health.stop()


def test_an_error_of_the_card_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a program is not."""
    monkeypatch.setattr(worker, "_LOOK_SECONDS", 0.02)
    written = ["6,1,7,-;usb 1-1: new device\n", xid(31), xid(79)]
    asyncio.run(_watch(tmp_path, written, "Xid 79 of 0000:3b:00, 99000 s after the machine's start"))


def test_no_card_and_no_log(tmp_path: Path) -> None:
    async def run() -> None:
        for root in (tmp_path / "none", tmp_path / "card"):
            root.mkdir()
            if root.name == "card":
                Tree(root, PCI)
            health = Health(dict, dict, system=System(str(root)))
            health.start({})
            await asyncio.sleep(0.05)
            assert health.heartbeat() == {}
            health.stop()

    asyncio.run(run())


def test_the_known_answer_of_this_machine() -> None:
    health, handlers = Health(dict, dict), {"other": len}

    async def run() -> float:
        health.start(handlers)
        seconds: float = await handlers[worker.OP]()
        health.stop()
        return seconds

    assert 0 <= asyncio.run(run()) < 600
    assert handlers == {"other": len}
