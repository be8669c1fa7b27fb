"""The stress player itself: a few seeds, and that it notices what it is for. `ci/stress.py` plays many."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from tests.stress import play, works

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("event", ["kill", "close", "drop", "retire"])
def test_answers_are_right_when_workers_are_lost(event: str) -> None:
    planned = play.plan(1, ("merge", "shuffle"), (event,))._replace(delay=(0.2, 0.02))
    recovery = asyncio.run(play.play(1, planned))
    assert recovery["amending"] == 0


def test_a_wrong_answer_is_noticed() -> None:
    def missing(frame: object, n: int) -> object:
        return whole(frame, n).iloc[1:]

    whole = works._whole
    planned = play.plan(2, ("shuffle",), ("add",))
    with mock.patch.object(works, "_whole", missing), pytest.raises(AssertionError):
        asyncio.run(play.play(2, planned))


def test_counted_errors_are_noticed() -> None:
    statistics = {"shuffle": {"errors": 2, "runs": 5, "recovery": {"last_error": ""}}, "tiers": {"retired": "x"}}
    assert list(play.errors(statistics)) == [(".shuffle.errors", 2), (".tiers.retired", "x")]
