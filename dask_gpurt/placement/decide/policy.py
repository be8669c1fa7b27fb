"""`Policy`: the choice among the candidates, and the interface for a user's own choice.

A *policy* is any class that can be made without arguments and has the method of `Policy`. It sees one task and at most
``gpurt.placement.candidates`` workers as tuples of numbers (`dask_gpurt.model.views`), and answers with an index.
`Cheapest` is the default; `load` finds the class that ``gpurt.policy`` names.

`candidates` chooses the workers. `takeover.seam` obeys user restrictions, checks the answer, and lets Dask decide when
the policy raises. A policy acts on nothing and sees no scheduler. So the same class runs in a live cluster
(``gpurt.policy: "package.module:Class"``) and in `dask_gpurt.simulate.simulate`. A policy is not asked about root tasks
and stealing; those work as with ``gpurt``.

The protocol is stable: fields are only ever added at the end of the views.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dask_gpurt.errors import ConfigError
from dask_gpurt.placement.decide.cost import cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView, WorkerView

#: the name of a class, as in the setting
CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@runtime_checkable
class Policy(Protocol):
    """The interface of a placement policy."""

    def decide(self, task: TaskView, workers: Sequence[WorkerView], far: Link) -> int | None:
        """Where a task should run.

        Called on the scheduler's event loop, once per task that has inputs. A decision may take some ten microseconds.

        Parameters
        ----------
        task
            What is expected of the task: seconds, bytes of result, seconds of slack.
        workers
            The candidates, at least one, all of them allowed to run the task.
        far
            The path between two nodes: latency in seconds, bytes/s.

        Returns
        -------
        int or None
            Index into `workers`; None leaves the decision to Dask. Anything else, and any exception, is counted as a
            failure, and Dask decides.
        """
        ...


class Cheapest:
    """``gpurt``: the worker on which the task costs the fewest seconds, see `cost`."""

    def decide(self, task: TaskView, workers: Sequence[WorkerView], far: Link) -> int:
        """Index of the cheapest candidate; among equals the one that holds fewer bytes, then the first.

        Raises
        ------
        ValueError
            No candidates.
        """
        best = -1
        best_cost = best_held = 0.0
        for i, worker in enumerate(workers):
            seconds = cost(task, worker, far)
            if best < 0 or seconds < best_cost or (seconds == best_cost and worker.held_bytes < best_held):
                best, best_cost, best_held = i, seconds, worker.held_bytes
        if best < 0:
            raise ValueError("no candidates to choose from; at least one worker is needed")
        return best


def load(name: str) -> Policy:
    """Make the policy for a value of ``gpurt.policy``; ``stock`` (Dask's own choice) has none.

    Raises
    ------
    ConfigError
        The module or the class is not there, the class cannot be made without arguments, or it has no ``decide``.
    """
    if name == "gpurt":
        return Cheapest()
    if not CLASS.fullmatch(name):
        raise ConfigError(
            f"gpurt.policy is {name!r}, must be 'gpurt', 'stock' or 'package.module:Class'. "
            "Remedy: see docs/policies.md"
        )
    module_name, _, class_name = name.partition(":")
    said = f"gpurt.policy is {name!r}, but "
    try:
        module = importlib.import_module(module_name)
    except Exception as e:
        raise ConfigError(
            f"{said}importing {module_name} failed: {type(e).__name__}: {e}. Remedy: install the module where the "
            "scheduler runs, or add its folder to PYTHONPATH"
        ) from e
    try:
        cls = getattr(module, class_name)
    except AttributeError:
        classes = ", ".join(sorted(k for k, v in vars(module).items() if isinstance(v, type) and hasattr(v, "decide")))
        raise ConfigError(
            f"{said}{module_name} has no {class_name}. Classes with a decide method there: "
            f"{classes or 'none'}. Remedy: name one of them"
        ) from None
    if not callable(getattr(cls, "decide", None)):
        raise ConfigError(
            f"{said}{class_name} has no method decide(task, workers, far). Remedy: see docs/policies.md for an example"
        )
    try:
        policy = cls()
    except Exception as e:
        raise ConfigError(
            f"{said}{class_name}() failed: {type(e).__name__}: {e}. Remedy: make it a class that takes no arguments"
        ) from e
    return policy
