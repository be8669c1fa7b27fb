"""docs/checklist.md keeps a row for each of the 126 requirements, and its proofs exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
IDS = [f"A{i}" for i in range(1, 37)] + [f"H{i}" for i in range(1, 27)] + [f"O{i}" for i in range(1, 65)]


def rows() -> list[list[str]]:
    lines = (ROOT / "docs/checklist.md").read_text().splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if re.match(r"\| [AHO]\d+ ", line)]


def test_every_id_once_and_in_order() -> None:
    assert [row[0] for row in rows()] == IDS


def test_states_and_proofs() -> None:
    counts: dict[str, int] = {}
    for id_, requirement, state, what, proof in rows():
        counts[state] = counts.get(state, 0) + 1
        assert requirement, id_
        assert state in ("met", "partly", "not yet", "not possible here"), id_
        paths = re.findall(r"`([^`]+)`", proof)
        if state in ("met", "partly"):
            assert what, id_
            assert paths, id_
        for path in paths:
            assert (ROOT / path).exists(), f"{id_}: {path} does not exist"
    said = "In all: " + ", ".join(f"{counts.get(s, 0)} {s}" for s in ("met", "partly", "not yet")) + "."
    assert said in (ROOT / "docs/checklist.md").read_text()
