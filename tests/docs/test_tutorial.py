"""docs/tutorial.md from its first block to its last, as one session."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from .blocks import ROOT, Block, of_page, path_entries

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = of_page(ROOT / "docs" / "tutorial.md")
#: each block that the tutorial has; the test of blocks looks for these names here
NAMES = [
    *("tutorial-start", "tutorial-status", "tutorial-work", "tutorial-where", "tutorial-explain", "tutorial-report"),
    *("tutorial-record", "tutorial-replay", "tutorial-end"),
]

#: after the shuffle: it ran here, and something was spilled
SHUFFLED = """
status = dask_gpurt.status(client)
assert status.scheduler["shuffle"]["runs"] >= 1, status.scheduler["shuffle"]
assert status.totals()["tiers.written.bytes"] > 0, status.totals()
assert abs(total - sum(part(i).x.sum() for i in range(8))) < 1e-3, total
"""


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _program(blocks: list[Block], port: int) -> str:
    """One program: Python blocks as they are, commands of the shell between them."""
    out = []
    for block in blocks:
        source = block.text.replace("8786", str(port)).replace('":8787"', '":0"')
        if block.language == "sh":
            source = f"import subprocess\nsubprocess.run(['bash', '-euc', {source!r}], check=True)\n"
        out += [source, SHUFFLED if block.name == "tutorial-work" else "", f"print('after {block.name}', flush=True)\n"]
    return "".join(out)


@pytest.mark.cluster
@pytest.mark.slow
def test_it_runs_from_the_first_block_to_the_last(tmp_path: Path) -> None:
    assert [block.name for block in BLOCKS] == NAMES
    (tmp_path / "bin").mkdir()
    dask = tmp_path / "bin" / "dask"
    dask.write_text(f'#!/bin/sh\nexec {sys.executable} -m dask "$@"\n')
    dask.chmod(0o755)
    env = {"PATH": f"{dask.parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(path_entries())}
    done = subprocess.run(
        [sys.executable, "-c", _program(BLOCKS, _port())],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = done.stdout
    assert said.index("after tutorial-start") < said.index("2 of 2 workers") < said.index("after tutorial-status")
    spilled = said[said.index("after tutorial-work") : said.index("after tutorial-where")]
    assert "disk" in spilled
    assert "stock" in said[said.index("after tutorial-record") : said.index("after tutorial-replay")]
    assert (tmp_path / "run.html").stat().st_size > 1000
