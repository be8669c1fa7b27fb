"""Messages between scheduler and workers go over the wire as plain values, and come back as they were."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.protocol import messages
from dask_gpurt.shuffle.protocol.recovery import State
from dask_gpurt.shuffle.worker.amendment import Amendment
from dask_gpurt.shuffle.worker.join_filter import JoinRows

EXAMPLES = [
    messages.Amend(3, ("tcp://a",), {0: "tcp://b", 7: "tcp://c"}, {7: 2}, {7: "tcp://b"}, None),
    messages.Amend(1, (), {}, {}, {}, frozenset()),
    messages.Amend(255, ("a", "b"), {1: "c"}, {}, {}, frozenset({5, 1, 9})),
    messages.Valid(2, {0: 0, 5: 2}),
    messages.Reopen(4),
    messages.Flush(3),
    messages.Complete(9),
    messages.AskHistogram(),
    messages.Vouched(2, ((0, 0, "key"), (1, 2, ("shuffle-transfer-x", 1)))),
    messages.HistogramAnswer(b"\x01\x00", 10, (3, "k = 1 (99%)"), 0.5),
    messages.HistogramAnswer(b"", 0, None, 0.0),
    messages.AskJoinKeys(),
    messages.AskJoinBits(1 << 10),
    messages.TakeJoinFilter(b"\x01" * 8, True, -5, (1 << 64) - 1),
    messages.JoinKeys(12, 0.5, False, 0, -1, 3, 400, 390, 0.25, b"1234", frozenset({0, 7})),
    messages.AskJoinHits(b"12345678"),
    messages.JoinHits(b"\x00\x01"),
    messages.JoinBits(b""),
    messages.OutputOpened(True),
    messages.Ok(),
]


def over_the_wire(data):
    """As distributed's comms do it."""
    return msgpack.loads(msgpack.dumps(data), use_list=False, strict_map_key=False)


@pytest.mark.parametrize("message", EXAMPLES, ids=str)
def test_they_come_back_as_they_were(message):
    data = over_the_wire(message.to_dict())
    assert type(message).from_dict(data) == message
    if messages.KIND in data:
        assert messages.parse(data) == message
    else:
        assert data["status"] == "OK"
    # A mapping keeps its order: the places of outputs among those that move depend on it.
    back = type(message).from_dict(data)
    for field in dataclasses.fields(message):
        if isinstance(value := getattr(message, field.name), dict):
            assert list(value) == list(getattr(back, field.name))


def test_every_message_is_answered():
    answered = {*Amendment.ANSWERS, *JoinRows.ANSWERS, messages.AskHistogram, messages.Flush}
    assert answered == set(messages.MESSAGES.values())
    assert {messages.MESSAGES[kind].HEAD[messages.KIND] for kind in messages.MESSAGES} == set(messages.MESSAGES)


def test_a_message_is_of_the_latest_epoch():
    state = State(epoch=2, lost=["a"], opened=frozenset({1}), bound={1: 2}, handing={1: "b"})
    message = messages.Amend.of(state, {0: "b", 1: "c"})
    state.lost.append("later")
    state.handing.clear()
    assert message == messages.Amend(2, ["a"], {0: "b", 1: "c"}, {1: 2}, {1: "b"}, frozenset({1}))


@pytest.mark.parametrize("data", [{"gpurt": "amand", "epoch": 1}, {}, {"gpurt": None}, {"gpurt": ["amend"]}])
def test_an_unknown_message_is_an_error_that_says_so(data):
    with pytest.raises(
        WireError, match=r"must be one of amend, valid, reopen, flush, complete, histogram, join-keys, .*\. Remedy"
    ):
        messages.parse(data)


def test_a_missing_field_is_an_error_that_says_so():
    with pytest.raises(WireError, match=r"Valid without attempts arrived.*Remedy"):
        messages.parse({"gpurt": "valid", "epoch": 1})
