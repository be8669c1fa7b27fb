"""What has to hold between the turns of a loop; each raises AssertionError where it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.shuffle.scheduler.phases import Phase

if TYPE_CHECKING:
    from dask_gpurt.shuffle.scheduler.runs import RunRecord, Runs
    from dask_gpurt.shuffle.transport.link.credits import Arbiter


def check_record(record: RunRecord) -> None:
    """The phase of a run agrees with its amendments."""
    state = record.amendments
    if record.phase is Phase.RECEIVING:
        assert state.opened is None, record
    elif record.phase is Phase.PASSED:
        assert not state.opened, record
    elif record.phase is Phase.OPENED:
        assert state.opened, record
        assert not state.handing, record
    assert state.handing.keys() <= state.bound.keys(), record
    assert max(state.bound.values(), default=0) <= state.epoch, record
    assert max(state.scopes, default=0) <= state.epoch, record
    assert state.validity is None or state.validity.epoch <= state.epoch, record
    assert record.telling is None or state.epoch or record.phase is Phase.ENDED, record


def check_runs(runs: Runs) -> None:
    """So do all records, and those of active runs alone have not ended."""
    for record in runs._records.values():
        check_record(record)
        assert (record.phase is Phase.ENDED) != runs.current(record), record


def check_books(arbiter: Arbiter) -> None:
    """The books of a receive budget add up."""
    accounts = arbiter._accounts.values()
    reserved = sum(a.granted - a.arrived + a.held for a in accounts)
    assert arbiter.reserved == reserved, (arbiter.reserved, arbiter._accounts)
    assert arbiter._windows == sum(a.window for a in accounts), (arbiter._windows, arbiter._accounts)
    assert arbiter.held == sum(a.held for a in accounts), (arbiter.held, arbiter._accounts)
    assert 0 <= arbiter.reserved <= arbiter.budget, (arbiter.reserved, arbiter.budget)
    assert 0 <= arbiter._windows <= arbiter.budget // 2
    for link, a in arbiter._accounts.items():
        assert 0 <= a.arrived <= a.granted, (link, a)
        assert a.held >= 0, (link, a)
        assert 0 <= a.window <= a.granted - a.arrived, (link, a)
        assert not a.closed or a.granted == a.arrived, (link, a)
    assert all(link in arbiter._accounts for link in arbiter._queue)
