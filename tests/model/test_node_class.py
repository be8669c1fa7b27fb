"""The class of a node: the key is the hardware, patterns choose by it, and it travels as plain values."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest

from dask_gpurt.model.node_class import EXTRA, UNKNOWN, Gpu, NodeClass, key_of

GiB = 2**30
H200 = Gpu(vendor="NVIDIA", model="NVIDIA H200", memory_bytes=140 * GiB)
NODE = NodeClass(
    gpus=(H200, H200),
    cpu="AMD EPYC 9654 96-Core Processor",
    cores=192,
    memory_bytes=1511 * GiB,
    filesystem="xfs",
    nics=(10**11, 2 * 10**11),
    stack=(("dask", "2026.8.0"), ("driver", "580.1")),
)


def test_the_key_says_what_is_known() -> None:
    assert NODE.key == "h200-2x140g.epyc-9654.192c.1500g.xfs.200gbit"
    assert NodeClass().key == "cpu"
    assert NodeClass(memory_bytes=int(7.72 * GiB)).key == "cpu.7.7g"


def test_the_key_is_the_hardware() -> None:
    assert dataclasses.replace(NODE, stack=(("dask", "2027.1.0"),)).key == NODE.key
    assert dataclasses.replace(NODE, memory_bytes=1508 * GiB).key == NODE.key, "two nodes of one kind"
    for other in ({"gpus": (H200,)}, {"cpu": "AMD EPYC 9754"}, {"cores": 96}, {"memory_bytes": 700 * GiB}):
        assert dataclasses.replace(NODE, **other).key != NODE.key


def test_a_mig_instance_is_another_class() -> None:
    mig = Gpu(vendor="NVIDIA", model="NVIDIA H200 MIG 1g.18gb", memory_bytes=17 * GiB)
    assert NodeClass(gpus=(H200, mig, mig)).key == "h200-1x140g+h200-mig-1g-18gb-2x17g"


@pytest.mark.parametrize(
    ("pattern", "fits"), [("h200*", True), ("H200-2*", True), ("*.epyc*", True), ("h100*", False), ("cpu*", False)]
)
def test_patterns(pattern: str, fits: bool) -> None:
    assert NODE.matches(pattern) is fits


def test_there_and_back() -> None:
    from distributed.protocol import dumps, loads

    assert NodeClass.from_dict(loads(dumps(NODE.to_dict()))) == NODE
    assert hash(NODE)


@pytest.mark.parametrize(
    "told",
    [{}, {"version": 2}, {"version": 1}, NODE.to_dict() | {"gpus": [{"model": "x"}]}, NODE.to_dict() | {"nics": 3}],
)
def test_what_is_no_node_class_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="node class"):
        NodeClass.from_dict(told)


def test_what_the_scheduler_keeps_of_a_worker() -> None:
    node = NodeClass(cpu="AMD EPYC 9654", cores=192)
    ws: Any = types.SimpleNamespace(extra={EXTRA: node.to_dict()})
    assert key_of(ws) == node.key == "cpu.epyc-9654.192c"
    ws.extra.clear()
    assert key_of(ws) == key_of(None) == UNKNOWN
