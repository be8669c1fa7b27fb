"""The stand-in finds what it is there to find."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("rmm")

from tests.backends.lazy_memory import FREED, FRESH, LazyMemory, NotReady, Stream, UsedAfterFree


def test_copies_run_when_they_are_waited_for() -> None:
    memory = LazyMemory()
    block = memory.allocate(5)
    memory.write(block, b"hello")
    target = memoryview(bytearray(5))
    memory.read(block, target)
    assert bytes(target) == bytes([FRESH]) * 5
    memory.ready()
    assert bytes(target) == b"hello"
    assert memory.bytes_of(block) == b"hello"
    assert memory.copied_bytes == 10
    assert not memory.faults


def test_what_is_not_ready_cannot_be_read() -> None:
    memory = LazyMemory()
    block = memory.allocate(5)
    assert memory.bytes_of(block) == bytes([FRESH]) * 5
    memory.write(block, b"hello")
    with pytest.raises(NotReady):
        memory.bytes_of(block)
    # Nor by another stream, however long that waits for itself.
    other = Stream()
    first = memory.stream
    memory.use(other)
    memory.read(block, memoryview(bytearray(5)))
    with pytest.raises(NotReady):
        memory.ready()
    first.run()
    memory.read(block, target := memoryview(bytearray(5)))
    memory.ready()
    assert bytes(target) == b"hello"
    assert len(memory.faults) == 2


def test_memory_is_free_in_the_order_of_its_stream() -> None:
    memory = LazyMemory()
    block = memory.allocate(4)
    memory.write(block, b"abcd")
    memory.read(block, target := memoryview(bytearray(4)))
    held = memory.allocated_bytes()
    assert held >= 4
    del block  # after the copies, on the same stream
    assert memory.allocated_bytes() == held
    memory.ready()
    assert bytes(target) == b"abcd"
    assert memory.allocated_bytes() == 0


def test_another_stream_may_come_too_late() -> None:
    memory = LazyMemory()
    block = memory.allocate(4)
    memory.write(block, b"abcd")
    memory.ready()
    first = memory.stream
    memory.use(Stream())
    memory.read(block, target := memoryview(bytearray(4)))
    del block  # given up before this stream was waited for
    first.run()
    with pytest.raises(UsedAfterFree):
        memory.ready()
    assert bytes(target) == bytes([FRESH]) * 4
    assert FREED != FRESH


def test_allocations_fail_at_the_limit_and_on_purpose() -> None:
    memory = LazyMemory(1200)
    kept = memory.allocate(600)
    with pytest.raises(MemoryError):
        memory.allocate(600)
    del kept
    again = memory.allocate(600)  # what was given up is there once its stream got to it
    memory.fail = lambda number: number == 5
    memory.allocate(1)
    with pytest.raises(MemoryError, match="allocation 5 fails on purpose"):
        memory.allocate(1)
    assert again.nbytes <= memory.peak_bytes() <= 1200
    assert not memory.faults


def test_each_thread_has_a_stream() -> None:
    memory = LazyMemory()
    block = memory.allocate(1)

    def thread() -> None:
        memory.write(block, b"x")

    one = threading.Thread(target=thread)
    one.start()
    one.join()
    memory.ready()
    with pytest.raises(NotReady):
        memory.bytes_of(block)
    memory.drain()
    assert memory.bytes_of(block) == b"x"
