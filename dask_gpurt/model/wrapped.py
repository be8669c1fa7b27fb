"""`Wrapped`: a method of one object, wrapped for a while so that others may wrap it before and after.

What was set on the object itself before is put back. Where others have wrapped ours in turn it stays in their chain; it
is no longer active then, and only passes the call on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Wrapped(ABC):
    """One method of one object. A subclass says what is called instead."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._stock: Callable[..., Any] = getattr(owner, name)
        self._had = name in vars(owner)
        #: whether ours is to do anything
        self._active = False
        self._ours = self._wrap(self._stock)

    @abstractmethod
    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """What is called instead of `stock`; it passes on while `_active` is False."""

    def install(self) -> None:
        """Put ours in its place."""
        self._active = True
        setattr(self._owner, self._name, self._ours)

    def uninstall(self) -> None:
        """Put back what was there; calls under way end as they would have. A second call does nothing."""
        self._active = False
        if vars(self._owner).get(self._name) is not self._ours:
            return
        if self._had:
            setattr(self._owner, self._name, self._stock)
        else:
            delattr(self._owner, self._name)
