"""`Wrapped`: a method of one object, or a handler of a dict, wrapped for a while. Others may wrap it before and after.
`StatusChanges`: the scheduler's handler of what workers say of their status.

What was set on the object itself before is put back. Where others have wrapped ours in turn it stays in their chain; it
is no longer active then, and only passes the call on.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Wrapped(ABC):
    """One method of one object, or one handler of a dict of handlers. A subclass says what is called instead."""

    def __init__(self, owner: object, name: str) -> None:
        self._name = name
        #: where ours is put
        self._place: dict[str, Any] = owner if isinstance(owner, dict) else vars(owner)
        self._stock: Callable[..., Any] = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        self._had = name in self._place
        #: whether ours is to do anything
        self._active = False
        # With stock's signature: a server looks there for what a handler takes, as the serializers of a client.
        self._ours = functools.update_wrapper(self._wrap(self._stock), self._stock)

    @abstractmethod
    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """What is called instead of `stock`; it passes on while `_active` is False."""

    def install(self) -> None:
        """Put ours in its place."""
        self._active = True
        self._place[self._name] = self._ours

    def uninstall(self) -> None:
        """Put back what was there; calls under way end as they would have. A second call does nothing."""
        self._active = False
        if self._place.get(self._name) is not self._ours:
            return
        if self._had:
            self._place[self._name] = self._stock
        else:
            del self._place[self._name]


class StatusChanges(Wrapped):
    """Keeps some changes of status of some workers from the scheduler.

    Parameters
    ----------
    keeps
        Of status, worker and stimulus: whether it is kept back.
    """

    def __init__(self, handlers: dict[str, Any], keeps: Callable[[str, str, str], bool]) -> None:
        self._keeps = keeps
        super().__init__(handlers, "worker-status-change")

    def _wrap(self, stock: Callable[..., None]) -> Callable[..., None]:
        def handle(status: str, worker: str, stimulus_id: str, **kwargs: Any) -> None:
            if not (self._active and self._keeps(status, worker, stimulus_id)):
                stock(status=status, worker=worker, stimulus_id=stimulus_id, **kwargs)

        return handle

    def deliver(self, worker: str, stimulus_id: str) -> None:
        """Hand on that a worker runs, which was kept back."""
        self._stock(status="running", worker=worker, stimulus_id=stimulus_id)
