"""The blocks of the documentation that a user copies, and what their pages say was done with them.

A block is a fence below ``<!-- block: NAME -->``. The paragraph after it, in asterisks, says how it was exercised, and
names the test file that does so. `load` finds them all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "deploy").glob("*.md")), ROOT / "docs" / "tutorial.md"]

_BLOCK = re.compile(
    r"^<!-- block: (?P<name>[a-z-]+) -->\n```(?P<language>\w+)\n(?P<text>.*?)^```\n\n(?P<said>\*[^*]+\*)?$",
    re.MULTILINE | re.DOTALL,
)
_TEST = re.compile(r"`(tests/docs/\w+\.py)`")


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: Path
    name: str
    language: str
    text: str
    #: what its page says was done with it, without the asterisks; "": nothing
    said: str

    @property
    def tests(self) -> list[str]:
        """The test files that `said` names."""
        return _TEST.findall(self.said)


def of_page(page: Path) -> list[Block]:
    """The blocks of one page, in its order."""
    return [
        Block(page, m["name"], m["language"], m["text"], (m["said"] or "").strip("*"))
        for m in _BLOCK.finditer(page.read_text())
    ]


def load() -> dict[str, Block]:
    """All blocks by name."""
    return {block.name: block for page in PAGES for block in of_page(page)}


def text(name: str, **replaced: str) -> str:
    """The text of a block, with some of it replaced.

    Parameters
    ----------
    name
        Of the block.
    **replaced
        Values of Python names below; each old text must be there, so that a changed page is noticed:
        ``address`` for ``tcp://10.0.0.1:8786``, ``workers`` for the number in ``n_workers=2``.

    Raises
    ------
    AssertionError
        The block lacks what is to be replaced.
    """
    out = load()[name].text
    patterns = {
        "address": (r"tcp://(10\.0\.0\.1|127\.0\.0\.1):8786", "{}"),
        "workers": (r"n_workers=\d", "n_workers={}"),
    }
    for what, value in replaced.items():
        pattern, new = patterns[what]
        out, times = re.subn(pattern, new.format(value), out)
        assert times, f"the block {name} has no {what}"
    return out


def run_python(source: str, folder: Path, *, seconds: float = 150, env: dict[str, str] | None = None) -> str:
    """Run a program as a notebook would: without a file that child processes import. Returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path_entries()), **(env or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{source}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def path_entries() -> list[str]:
    """This checkout first, then what the environment has."""
    return [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
