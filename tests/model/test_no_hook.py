"""A plugin without a use for transitions costs no Python frame for them."""

from __future__ import annotations

import types

import pytest

from dask_gpurt.extension.delivery import Delivered
from dask_gpurt.extension.scheduler import GpurtScheduler
from dask_gpurt.preflight.gate import Gate
from dask_gpurt.quarantine.scheduler import Quarantine


@pytest.mark.parametrize("plugin", [GpurtScheduler, Gate, Quarantine, Delivered])
def test_transitions_are_ignored_without_a_frame(plugin: type) -> None:
    hook = object.__new__(plugin).transition  # as distributed asks for it: of an object
    assert isinstance(hook, types.BuiltinFunctionType), "a Python function is called five times for each task"
    hook("key", "processing", "memory", stimulus_id="s", worker="w", nbytes=1, startstops=[])
    hook("{0}", "{", "}")  # nothing that is passed is looked at
