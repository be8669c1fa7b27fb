"""Who is at fault, by what was seen."""

from __future__ import annotations

import random

import pytest

from dask_gpurt.quarantine.evidence import FAILURES, SLOW_SECONDS, WINDOW_SECONDS, Cause, Evidence


def said(evidence: Evidence, now: float = 0.0) -> set[tuple[str, str, str]]:
    return {(s.worker, s.cause.value, s.peer) for s in evidence.suspects(now)}


def test_a_node_with_failures_to_two_peers() -> None:
    evidence = Evidence()
    evidence.corrupt("a", "b", 2, 0.0)
    assert said(evidence) == set()
    evidence.corrupt("a", "c", 1, 0.0)
    assert said(evidence) == {("a", "corruption", "")}


def test_a_receiver_can_be_the_one() -> None:
    """Its card or its memory turns what two sound workers send."""
    evidence = Evidence()
    evidence.corrupt("b", "a", 2, 0.0)
    evidence.corrupt("c", "a", 2, 0.0)
    assert said(evidence) == {("a", "corruption", "")}


def test_failures_between_two_are_the_links() -> None:
    evidence = Evidence()
    evidence.corrupt("a", "b", FAILURES, 0.0)
    assert said(evidence) == {("a", "corruption", "b")}


def test_what_one_node_explains_is_not_held_against_its_peers() -> None:
    evidence = Evidence()
    for peer in "bcdef":
        evidence.corrupt("a", peer, 5, 0.0)
    evidence.corrupt("b", "c", 1, 0.0)  # once, by itself: too little
    assert said(evidence) == {("a", "corruption", "")}


@pytest.mark.parametrize("seed", range(20))
def test_bad_nodes_are_found_among_noise(seed: int) -> None:
    """Two bad senders of twelve, and single failures elsewhere: these two, and nobody else."""
    draw = random.Random(seed)
    names = [f"w{i}" for i in range(12)]
    bad, sound = names[:2], names[2:]
    evidence = Evidence()
    for sender in bad:
        for receiver in draw.sample(sound, 4):
            evidence.corrupt(sender, receiver, draw.randint(1, 3), draw.random())
    one, other = draw.sample(sound, 2)
    evidence.corrupt(one, other, 1, 0.5)
    assert {w for w, _, _ in said(evidence, 1.0)} == set(bad)


def test_old_failures_do_not_count() -> None:
    evidence = Evidence()
    evidence.corrupt("a", "b", 2, 0.0)
    evidence.corrupt("a", "c", 2, WINDOW_SECONDS - 1)
    assert said(evidence, WINDOW_SECONDS - 1) == {("a", "corruption", "")}
    assert said(evidence, WINDOW_SECONDS + 1) == set()


def test_counts_so_far_are_taken_once() -> None:
    evidence = Evidence()
    for _ in range(10):  # ten heartbeats
        evidence.corrupt_so_far("a", "b", 2, 0.0)
        evidence.disk_so_far("d", 2, 0.0)
    assert said(evidence) == set()
    evidence.corrupt_so_far("a", "b", 3, 0.0)
    evidence.disk_so_far("d", 3, 0.0)
    assert said(evidence) == {("a", "corruption", "b"), ("d", "disk", "")}


def test_hardware_counts_at_once() -> None:
    evidence = Evidence()
    evidence.hardware("a", "Xid 79 of 0000:3b:00")
    assert said(evidence) == {("a", "hardware", "")}


def test_slow_for_long_enough() -> None:
    evidence = Evidence()
    evidence.speeds({"a": 2.5, "b": 1.0}, 0.0)
    assert said(evidence, SLOW_SECONDS - 1) == set()
    assert said(evidence, SLOW_SECONDS) == {("a", "slow", "")}
    evidence.speeds({"a": 1.9, "b": 1.0}, SLOW_SECONDS)
    assert said(evidence, SLOW_SECONDS) == set()
    evidence.speeds({"a": 2.5}, SLOW_SECONDS)  # anew: its time begins again
    assert said(evidence, SLOW_SECONDS + 1) == set()


def test_a_pardon_holds_until_something_new() -> None:
    evidence = Evidence()
    evidence.disk_so_far("a", 5, 0.0)
    evidence.corrupt("a", "b", FAILURES, 0.0)
    evidence.hardware("a", "Xid 79")
    evidence.pardon("a")
    evidence.disk_so_far("a", 5, 1.0)
    evidence.hardware("a", "Xid 79")  # as each heartbeat tells it
    assert said(evidence, 1.0) == set()
    evidence.disk_so_far("a", 8, 1.0)
    assert said(evidence, 1.0) == {("a", "disk", "")}


def test_a_new_error_of_a_pardoned_card() -> None:
    evidence = Evidence()
    evidence.hardware("a", "Xid 79, 5 s after the start")
    evidence.pardon("a")
    evidence.hardware("a", "Xid 79, 9 s after the start")
    assert said(evidence) == {("a", "hardware", "")}


def test_slowed_clocks_count_as_slow_until_they_are_well() -> None:
    evidence = Evidence()
    evidence.clocks("a", "by heat")
    assert evidence.has_slow_clocks("a")
    assert said(evidence) == {("a", "slow", "")}
    assert "slowed by heat for 60 s" in evidence.suspects(0.0)[0].found
    evidence.pardon("a")
    evidence.clocks("a", "by heat")
    assert said(evidence) == set()
    evidence.clocks("a", "")
    assert not evidence.has_slow_clocks("a")
    evidence.clocks("a", "by heat")
    assert said(evidence) == {("a", "slow", "")}
    evidence.forget("a")
    assert said(evidence) == set()


def test_one_that_left_is_forgotten() -> None:
    evidence = Evidence()
    evidence.corrupt_so_far("a", "b", 5, 0.0)
    evidence.forget("b")
    assert said(evidence) == set()
    evidence.corrupt_so_far("a", "b", 1, 0.0)  # one with its address counts from nothing
    assert Cause.CORRUPTION.value not in {cause for _, cause, _ in said(evidence)}


def test_what_a_sender_did_is_not_held_against_the_next_with_its_address() -> None:
    """Its peers live on, and tell with every heartbeat what they have counted so far."""
    evidence = Evidence()
    for receiver in "bc":
        evidence.corrupt_so_far("a", receiver, 3, 0.0)
    evidence.forget("a")
    for receiver in "bc":
        evidence.corrupt_so_far("a", receiver, 3, 1.0)
    assert said(evidence, 1.0) == set()
    for receiver in "bc":
        evidence.corrupt_so_far("a", receiver, 5, 2.0)
    assert said(evidence, 2.0) == {("a", "corruption", "")}
