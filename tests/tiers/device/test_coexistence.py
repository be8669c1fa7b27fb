"""Every combination of what dask-cuda can set up and what `tiers.device` says: one decision, never two that evict."""

from __future__ import annotations

import itertools

import pytest

from dask_gpurt.backends.dask_cuda import Allocator, DeviceSetup, Store
from dask_gpurt.tiers.device.coexistence import RULES, decide

BOTH = (False, True)
#: every setup there is: 5 allocators x 4 stores x 16
SETUPS = [
    DeviceSetup(store, allocator, cudf, integrated, limit, host)
    for store, allocator, cudf, integrated, limit, host in itertools.product(
        Store, Allocator, BOTH, BOTH, (None, 1 << 30), BOTH
    )
]


def evicts_without_us(setup: DeviceSetup) -> bool:
    """Whether something else moves values or pages out of device memory, and cannot be put out of its place."""
    return setup.cudf_spills or setup.allocator is Allocator.MANAGED or setup.store in (Store.USED, Store.UNKNOWN)


@pytest.mark.parametrize("device", ["off", "auto", "on"])
def test_every_combination(device: str) -> None:
    works = 0
    for setup in SETUPS:
        decision = decide(setup, device)
        assert decision.works is (decision.reason == "")
        if device == "off":
            assert str(decision) == "gpurt.tiers.device is off"
            continue
        assert not (decision.works and evicts_without_us(setup)), setup
        # What the user forbade: values stay on the device; there is nowhere for them to go.
        assert not (decision.works and setup.store is Store.EMPTY and setup.device_limit_bytes is None), setup
        assert not (decision.works and (setup.integrated or not setup.host_limited)), setup
        works += decision.works
    # Plain workers, twice as the limit is not theirs, and those of dask-cuda, each with four allocators.
    assert works == (0 if device == "off" else 12)


@pytest.mark.parametrize("allocator", sorted(set(Allocator) - {Allocator.MANAGED}, key=str))
@pytest.mark.parametrize("store", [Store.OTHER, Store.EMPTY])
def test_what_works(store: Store, allocator: Allocator) -> None:
    assert decide(DeviceSetup(store, allocator, device_limit_bytes=1 << 30), "auto").works


@pytest.mark.parametrize(
    ("setup", "reason", "remedy"),
    [
        (DeviceSetup(cudf_spills=True), "cuDF's own spilling is on", "enable_cudf_spill=False"),
        (DeviceSetup(allocator=Allocator.MANAGED), "whose pages the driver moves", "--rmm-async"),
        (DeviceSetup(integrated=True), "device and host share one memory", ""),
        (DeviceSetup(Store.UNKNOWN), "not known here (JIT-unspill", "without data="),
        (DeviceSetup(Store.USED), "holds keys already", "before the first task"),
        (DeviceSetup(Store.EMPTY), "values never leave the device", "no --device-memory-limit 0"),
        (
            DeviceSetup(Store.EMPTY, device_limit_bytes=1, host_limited=False),
            "no limit of host memory",
            "--memory-limit",
        ),
    ],
)
def test_what_does_not_and_the_way_out(setup: DeviceSetup, reason: str, remedy: str) -> None:
    decision = decide(setup, "auto")
    assert reason in decision.reason
    assert remedy in decision.remedy
    if remedy:
        assert "gpurt.tiers.device: off" in decision.remedy
        assert str(decision) == f"{decision.reason}. Remedy: {decision.remedy}"
    else:
        assert str(decision) == decision.reason


def test_each_rule_decides_for_some_setup() -> None:
    used = {decide(setup, "auto").reason for setup in SETUPS}
    assert {rule.decision.reason for rule in RULES} <= used
    assert all(hasattr(SETUPS[0], rule.field) for rule in RULES)
