"""`Decision`: what was compared for one task and what was chosen. `Declined`: why a task is left to Dask's own choice.

The log, the governor and shadow mode share one record, so that they use the same numbers.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView, WorkerView
    from dask_gpurt.placement.decide.candidates import Inputs
    from dask_gpurt.placement.tables.workers import WorkerInfo


class Declined(enum.StrEnum):
    """Why Dask's own choice stands. The values are shown in ``status`` and ``explain``."""

    #: all workers are alike and near, or the inputs are in one zone. In the text, stock means Dask's own choice
    PLAIN = "nothing that stock does not know"
    SAFE_MODE = "safe mode"
    NO_INPUTS = "no inputs"
    ACTOR = "actor"
    OVER_BUDGET = "over budget"
    TOOK_TOO_LONG = "took too long"
    NO_CANDIDATE = "no candidate"
    #: a policy of the user's returned None
    POLICY = "policy"
    GOVERNOR = "governor"
    GRAPH_JUDGE = "graph judge"
    #: the governor compares both by lot, and this decision is Dask's
    TRIAL = "trial"
    BOOKKEEPING = "bookkeeping retired"


class Decision(NamedTuple):
    """The comparison of some workers for one task. A tuple, as a decision takes only some ten microseconds in all."""

    #: the workers compared
    picked: list[WorkerInfo]
    inputs: Inputs
    #: what was known of each of them
    views: list[WorkerView]
    task: TaskView
    #: the slowest kind of link
    far: Link
    #: index of the chosen one
    choice: int

    @property
    def info(self) -> WorkerInfo:
        """The chosen worker."""
        return self.picked[self.choice]

    @property
    def view(self) -> WorkerView:
        """What was known of it."""
        return self.views[self.choice]
