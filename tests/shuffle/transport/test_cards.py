"""What workers ask each other about transports survives the wire, and a message of another version is refused."""

from __future__ import annotations

import msgpack
import pytest

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.protocol.messages import KIND, AskCard, AskCredit, Card
from dask_gpurt.shuffle.transport.peers import LinkTable
from dask_gpurt.shuffle.transport.plane import QUESTIONS


@pytest.mark.parametrize(
    "message",
    [
        AskCard("tcp://a:1", "process", "host"),
        AskCredit("tcp://a:1", 1 << 40),
        Card("process", "host", 1 << 20, ["lz4"], {"tcp": ["127.0.0.1", 4000], "ucx": b"address"}),
    ],
)
def test_there_and_back(message: AskCard | AskCredit | Card) -> None:
    plain = msgpack.loads(msgpack.dumps(message.to_dict()))
    assert type(message).from_dict(plain) == message
    if isinstance(message, Card):
        assert plain["status"] == "OK"
    else:
        assert plain[KIND] in QUESTIONS


def test_a_card_that_lacks_a_field_is_refused() -> None:
    plain = Card("process", "host", 1, [], {}).to_dict()
    del plain["limit"]
    with pytest.raises(WireError, match=r"Card without limit.*one version"):
        Card.from_dict(plain)


def test_what_is_kept_of_peers_that_are_gone_is_bounded() -> None:
    table = LinkTable()
    for i in range(table.LIMIT + 10):
        table.was_corrupt(f"tcp://a:{i}", "tcp")
        table.had_problem(f"tcp://a:{i}", "lost")
        table.had_problem("tcp://a:0", f"lost {i}")
    assert len(table.statistics()) == len(table.problems) == len(table.corrupt) == table.LIMIT
    assert table.problems["tcp://a:0"] == f"lost {i}"
    assert f"tcp://a:{i}" in table.corrupt
