"""`NO_WATCH`: a configuration for workers that live in the tests' own process.

Their memory is that of the whole suite. With a limit they would be paused, and wait for ever, because of tests that ran
before.
"""

from __future__ import annotations

from typing import Any

NO_WATCH: dict[str, Any] = {"distributed.worker.memory.spill": False, "distributed.worker.memory.pause": False}
