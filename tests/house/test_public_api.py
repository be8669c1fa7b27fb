"""Nothing public goes away, or changes, unseen."""

from __future__ import annotations

from pathlib import Path

import dask_gpurt
from tests.house.public_api import lines

SNAPSHOT = Path(__file__).with_name("public_api.txt")
REMEDY = (
    "the public interface is another one. If that is meant: `python -m tests.house.public_api > "
    "tests/house/public_api.txt`, a line in CHANGELOG.md, and what docs/versions.md promises about names that go away"
)


def test_the_public_interface_is_that_of_the_snapshot() -> None:
    before, now = SNAPSHOT.read_text().splitlines(), lines()
    gone, new = sorted({*before} - {*now}), sorted({*now} - {*before})
    assert (gone, new) == ([], []), REMEDY
    assert before == now


def test_a_change_is_seen(monkeypatch) -> None:
    before = lines()

    def attach(client, *, more):
        """Another signature."""

    monkeypatch.setattr(dask_gpurt, "attach", attach, raising=False)
    changed = lines()
    assert "dask_gpurt.attach(client, *, more)" in changed
    assert len(changed) == len(before)
    assert changed != before
