"""The class that plots and reports show."""

from __future__ import annotations

import types
from typing import Any

from dask_gpurt.model.node_class import EXTRA, NodeClass
from dask_gpurt.observe.figures.node_class import UNKNOWN, key_of


def test_what_the_worker_told() -> None:
    node = NodeClass(cpu="AMD EPYC 9654", cores=192)
    ws: Any = types.SimpleNamespace(extra={EXTRA: node.to_dict()})
    assert key_of(ws) == node.key == "cpu.epyc-9654.192c"
    ws.extra.clear()
    assert key_of(ws) == key_of(None) == UNKNOWN
