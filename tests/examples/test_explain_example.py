"""examples/explain.py runs as it is told to, and shows a local task, a moved one and a fallback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.cluster
def test_it_explains_a_local_a_moved_and_a_fallback_task(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "explain.py")],
        cwd=tmp_path,
        env={**__import__("os").environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    local, moved, fallback = (done.stdout.index(f"size-{kind}") for kind in ("local", "moved", "fallback"))
    assert "holds all of its inputs" in done.stdout[local:moved].replace("\n", " ")
    assert "20 MB of its 25 MB of inputs" in done.stdout[moved:fallback].replace("\n", " ")
    assert "so little data was not expected" in done.stdout[fallback:]
    assert "large" in done.stdout[fallback:]
