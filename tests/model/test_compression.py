"""Compressed frames come back as they were, and `auto` compresses where that is faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dask_gpurt.config import Settings
from dask_gpurt.errors import CorruptData
from dask_gpurt.model import compression


def need(*codecs: str) -> None:
    for name in codecs:
        pytest.importorskip({"lz4": "lz4.block", "zstd": "zstandard"}[name])


def noise(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, n, dtype="u1")


class Recorded:
    """A codec that keeps a share of what it compresses, and the clocks that see it.

    Parameters
    ----------
    kept
        That share.
    waits
        Seconds that a thread waits for the interpreter after a call.
    first
        Seconds of the processor that the first call of each kind takes, with nothing in the cache.
    """

    def __init__(self, kept: float, *, waits: float = 0.0, first: float = 1e-6) -> None:
        self._kept = kept
        self._waits = waits
        self._first = first
        self._cpu = self._wall = 0.0
        #: bytes, call by call
        self.compressed: list[int] = []
        self.expanded: list[int] = []

    def compress(self, block: Any) -> bytes:
        self._called(self.compressed, len(block))
        return bytes(int(self._kept * len(block)))

    def expand_into(self, block: Any, target: memoryview) -> int:
        self._called(self.expanded, target.nbytes)
        return target.nbytes

    def _called(self, calls: list[int], nbytes: int) -> None:
        took = 1e-6 if calls else self._first
        self._cpu += took
        self._wall += took + self._waits
        calls.append(nbytes)

    def chooser(self, monkeypatch: pytest.MonkeyPatch) -> compression.Chooser:
        """One that has this codec only, and its clocks."""
        clocks = SimpleNamespace(thread_time=lambda: self._cpu, perf_counter=lambda: self._wall)
        monkeypatch.setattr(compression, "time", clocks)
        monkeypatch.setattr(compression, "_MAKERS", {"lz4": lambda _: self})
        monkeypatch.setattr(compression, "_codecs", {"lz4": self})
        return compression.Chooser("auto")


@pytest.mark.parametrize("name", ["lz4", "zstd"])
@pytest.mark.parametrize("n", [1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_compressed_frames_come_back(name: str, n: int) -> None:
    need(name)
    mixed = np.concatenate([np.zeros(n, "u1"), noise(n), np.arange(n, dtype="u1")])
    stored = b"".join(compression.compress(name, mixed.data))
    assert len(stored) <= compression.most_stored(mixed.nbytes)
    back = compression.expand(name, memoryview(stored), mixed.nbytes)
    assert bytes(back) == mixed.tobytes()
    assert not back.readonly
    with pytest.raises(CorruptData):
        compression.expand(name, memoryview(stored)[:-5], mixed.nbytes)


def test_auto_compresses_where_it_is_faster() -> None:
    need("lz4", "zstd")
    chooser = compression.Chooser("auto")
    sparse, dense = np.zeros(1 << 22, "u1"), noise(1 << 22)
    text = memoryview("".join(f"customer_{i % 999:07d} " for i in range(200_000)).encode())
    assert chooser.choose(dense.data, 20e6, 20e6).codec == ""
    assert chooser.choose(sparse.data, 20e6, 20e6).codec in ("lz4", "zstd")
    assert chooser.choose(text, 1e6, 1e6).codec == "zstd", "the disk is slow, so the ratio decides"
    assert chooser.choose(text, 50e9, 50e9).codec == "", "no codec is that fast"
    assert chooser.choose(text[:1000], 20e6, 20e6).codec == "", "not worth a look"
    assert chooser.choose(text[:10_000], 50e9, 50e9, least_room=True).codec == "zstd", "room is all that counts"
    for few in (1 << 22, 20_000, compression.LEAST):
        assert chooser.choose(dense.data[:few], 1.0, 1.0, least_room=True) == compression.Choice("", ratio=1.0)
        assert chooser.least_bytes(sparse.data[:few]) < 0.1 * few
    assert compression.Chooser("none").choose(text, 1.0, 1.0).codec == ""
    assert compression.Chooser("lz4").choose(text, 50e9, 50e9).codec == "lz4"


def test_a_codec_that_turns_out_slow_is_chosen_less() -> None:
    need("lz4", "zstd")
    chooser = compression.Chooser("auto")
    text = memoryview("".join(f"customer_{i % 999:07d} " for i in range(200_000)).encode())
    for _ in range(20):
        for name in ("lz4", "zstd"):
            chooser.learn(compression.Choice(name, 1.0), 100_000.0)
    assert chooser.choose(text, 20e6, 20e6).codec == ""
    for _ in range(400):
        chooser.choose(text[: compression.SAMPLED], 20e6, 20e6)
    assert chooser.choose(text, 1e5, 1e5).codec == "zstd", "what was learned fades"


def test_rate_follows() -> None:
    rate = compression.Rate(window_bytes=100e6)
    assert rate.bytes_per_second is None
    rate.add(10, 1.0)  # latency, not bandwidth
    assert rate.bytes_per_second is None
    for _ in range(100):
        rate.add(10_000_000, 0.01)
    assert rate.bytes_per_second == pytest.approx(1e9)
    for _ in range(100):
        rate.add(10_000_000, 0.1)
    assert rate.bytes_per_second == pytest.approx(1e8, rel=0.05)


def test_a_frame_that_gains_nothing_costs_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread waits for the interpreter after each."""
    codec = Recorded(1.0)
    assert codec.chooser(monkeypatch).choose(noise(64 << 20).data, 20e6, 20e6).codec == ""
    assert codec.compressed == [2 << 14], "both ends"
    assert codec.expanded == []


def test_more_of_a_large_frame_is_looked_at_where_it_may_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Recorded(0.1)
    assert codec.chooser(monkeypatch).choose(noise(64 << 20).data, 20e6, 20e6).codec == "lz4"
    assert codec.compressed == codec.expanded == [2 << 14] + [1 << 14] * 14


@pytest.mark.parametrize("nbytes", [compression.SAMPLED, 64 << 20])
def test_first_calls_that_are_slow_do_not_decide(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """A worker's first values of zeros stayed as they were."""
    assert Recorded(0.01, first=0.002).chooser(monkeypatch).choose(noise(nbytes).data, 100e6, 100e6).codec == "lz4"
    little = Recorded(0.5, first=0.002)
    assert little.chooser(monkeypatch).choose(noise(nbytes).data, 100e6, 100e6).codec == ""
    assert little.expanded == []


def test_a_thread_that_waits_for_the_interpreter_does_not_make_a_codec_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sample. What all of a frame takes is learned, waiting included."""
    chooser = Recorded(0.01, waits=0.005).chooser(monkeypatch)
    assert chooser.choose(np.zeros(1 << 20, "u1").data, 100e6, 100e6).codec == "lz4"


def test_what_is_spilled_is_compressed_where_that_is_faster() -> None:
    assert Settings.load().tiers.codec == "auto"
