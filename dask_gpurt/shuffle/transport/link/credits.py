"""Grant senders the bytes that they may have on their way to this worker. Pure: one budget, many links, no clock.

Theory of operation. A receiver holds a message from its arrival until it is stored. All messages on their way and held
must fit the receive budget, however many senders there are, so a sender needs *credit* before it sends::

    reserved(link) = granted - arrived + held         sum of reserved over all links <= budget, always

Totals only ever grow and grants are sent as totals, so a grant that comes twice, late, or before an earlier one does no
harm. Two kinds of grants:

- a *window*: given before it is asked for, so that a lone sender never waits for a round trip. What was granted as a
  window may lie unused for good, hence all windows together take at most half of the budget;
- on *want*: a sender says which total its next message needs. Wants are served in the order they came. The other half
  of the budget is theirs, a message is at most `message_limit` = a quarter of the budget, and what is granted on want
  is used at once, so the first in the queue is always served after finitely many arrivals and stores: no deadlock.

Rejected: a limit per link (N links need N limits); taking windows back (a race with what is on the wire).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclasses.dataclass(slots=True)
class _LinkAccount:
    #: bytes this link may have sent in all
    granted: int = 0
    #: bytes that have arrived in all
    arrived: int = 0
    #: bytes that have arrived and are not stored
    held: int = 0
    #: the total that the sender wants
    wanted: int = 0
    #: part of granted - arrived that was given as a window
    window: int = 0
    closed: bool = False


class Arbiter:
    """The receive budget of one worker. Not thread-safe: callers hold a lock.

    Parameters
    ----------
    budget
        Bytes that messages on their way and messages not stored yet may take together.
    """

    def __init__(self, budget: int) -> None:
        if budget < 1024:
            raise ValueError(f"the receive budget is {budget} bytes, must be at least 1024")
        self.budget = budget
        self._accounts: dict[Hashable, _LinkAccount] = {}
        #: links that want more than they have, in the order they asked
        self._queue: dict[Hashable, None] = {}
        #: bytes granted and not arrived, or held
        self.reserved = 0
        self._windows = 0
        #: bytes that arrived and are not stored
        self.held = 0
        #: the most that was ever reserved, and held
        self.peak_reserved = 0
        self.peak_held = 0

    @property
    def message_limit(self) -> int:
        """Bytes of one message, at most."""
        return self.budget // 4

    def open(self, link: Hashable) -> None:
        """Add a link; it gets its window with the next `grants`."""
        self._accounts.setdefault(link, _LinkAccount())

    def granted(self, link: Hashable) -> int:
        """Bytes that a link was granted in all."""
        account = self._accounts.get(link)
        return 0 if account is None else account.granted

    def want(self, link: Hashable, total: int) -> bool:
        """The sender needs `total` bytes granted in all. False: more than a message may have."""
        account = self._accounts[link]
        if total - account.granted > self.message_limit:
            return False
        if total > account.wanted:
            account.wanted = total
        if account.wanted > account.granted:
            self._queue.setdefault(link)
        return True

    def arrive(self, link: Hashable, nbytes: int) -> bool:
        """A message of `nbytes` begins to arrive. False: it was not granted, do not receive it."""
        account = self._accounts.get(link)
        if account is None or account.closed or account.arrived + nbytes > account.granted:
            return False
        account.arrived += nbytes
        account.held += nbytes
        self.held += nbytes
        used = min(account.window, nbytes)
        account.window -= used
        self._windows -= used
        self.peak_held = max(self.peak_held, self.held)
        return True

    def overdraw(self, link: Hashable, nbytes: int) -> None:
        """A message of `nbytes` arrived that was not granted in full, and is received all the same.

        Both sides count it in their totals. So the sender's next want is for its next message alone, the want of this
        one is settled, and what credit was left for it is used up. It is not held against the budget.
        """
        account = self._accounts.get(link)
        if account is None or account.closed:
            return
        account.arrived += nbytes
        left = max(0, account.granted - account.arrived)
        self.reserved -= account.granted - (account.arrived - nbytes) - left
        self._windows -= account.window - min(account.window, left)
        account.window = min(account.window, left)
        account.granted = account.arrived + left
        if account.wanted <= account.granted:
            self._queue.pop(link, None)

    def stored(self, link: Hashable, nbytes: int) -> None:
        """A message that had arrived is stored, or was dropped."""
        account = self._accounts.get(link)
        if account is None:
            return
        account.held -= nbytes
        self.held -= nbytes
        self.reserved -= nbytes
        self._forget(link, account)

    def close(self, link: Hashable) -> None:
        """The link is gone: what was granted and has not arrived is free; what is held stays so until it is stored."""
        account = self._accounts.get(link)
        self._queue.pop(link, None)
        if account is None or account.closed:
            return
        account.closed = True
        self.reserved -= account.granted - account.arrived
        self._windows -= account.window
        account.granted, account.window = account.arrived, 0
        self._forget(link, account)

    def _forget(self, link: Hashable, account: _LinkAccount) -> None:
        if account.closed and not account.held:
            self._accounts.pop(link, None)

    def grants(self) -> dict[Hashable, int]:
        """Give what there is: link to its new total, for those that got more."""
        out: dict[Hashable, int] = {}
        for link in list(self._queue):
            account = self._accounts[link]
            need = account.wanted - account.granted
            if need > self.budget - self.reserved:
                # Strictly in order: smaller wants behind must not starve this one.
                return out
            del self._queue[link]
            self._give(account, need)
            out[link] = account.granted
        live = [(link, a) for link, a in self._accounts.items() if not a.closed]
        if not live:
            return out
        each = min(self.budget // 2 // len(live), self.budget // 2)
        for link, account in live:
            more = min(each - account.window, self.budget // 2 - self._windows, self.budget - self.reserved)
            # In halves: a grant of a few bytes is a message of no use.
            if more >= max(1, each // 2):
                self._give(account, more)
                account.window += more
                self._windows += more
                out[link] = account.granted
        return out

    def _give(self, account: _LinkAccount, nbytes: int) -> None:
        account.granted += nbytes
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
