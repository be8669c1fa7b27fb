"""Schedules of a device's memory, some hundreds of them; `ci/device_schedules.py` plays 10^5."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("rmm")

from tests.shuffle.rows import device_schedules
from tests.shuffle.rows.device_schedules import ArrowFrames, play


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**64 - 1))
def test_schedules(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("what", ["a wait", "the last wait of a split"])
def test_a_missing_wait_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules can fail."""
    ready = ArrowFrames.ready
    calls = [0]

    def skipping(self: ArrowFrames) -> None:
        calls[0] += 1
        if calls[0] % 7:
            ready(self)

    if what == "a wait":
        monkeypatch.setattr(ArrowFrames, "ready", skipping)
    else:
        monkeypatch.setattr(device_schedules.DeviceRows, "_split", _without_the_last_wait)
    with pytest.raises((AssertionError, OSError, ValueError)):
        _many()


def _many() -> None:
    for seed in range(300):
        play(seed)


def _without_the_last_wait(self: object, *args: object) -> object:
    frames = self._frames  # type: ignore[attr-defined]
    self._frames = _Hasty(frames)  # type: ignore[attr-defined]
    try:
        return _split(self, *args)
    finally:
        self._frames = frames  # type: ignore[attr-defined]


_split = device_schedules.DeviceRows._split


class _Hasty:
    """Waits once, as long as rows are put in order."""

    def __init__(self, frames: ArrowFrames) -> None:
        self._frames, self._waits = frames, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._frames, name)

    def ready(self) -> None:
        self._waits += 1
        if self._waits == 1:
            self._frames.ready()
