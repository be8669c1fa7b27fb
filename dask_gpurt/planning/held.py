"""`HeldExpressions`: keep the expressions of queries for a while, so that planning the next query finds them again.

`install` and `uninstall` change the client's process; `figures` counts. One object, `HELD`, serves a process.

Dask's dataframe expressions are singletons: an expression is looked up by its name, a token of its type and operands,
before a second one is made. What was computed for the first (its empty frame, its divisions) is found with it. But the
table holds weak references, and most expressions of an optimisation die within it, so each query computes all of it
again. While this is installed, expressions live on after their query. Nothing else changes: the names, the lookup and
the results are Dask's.

Why an answer cannot be wrong:

1. Two expressions of one name are the same to Dask itself: it gives out the first as long as anyone keeps it. A name
   contains paths, sizes and modification times of files that are read, so a file that was written again has another.
   What reads files of which less is known, neither local nor objects in a store, is not held (`files`).
2. What an expression has computed also depends on a part of Dask's configuration, on pandas' options, on whether
   there is a client, and on the modules of users' functions (`surroundings`). When one of these changes,
   everything is let go before the next lookup.
3. Only kinds of expressions that compute nothing by chance or by calling functions of users are held
   (`seam.KINDS`), with plain operands, and with all that they are made of. What reads a frame in memory, futures
   or delayed objects is not held, nor is what is built on it, so no data lives longer than its owner wants.
4. Operands that can change, such as a list of a user's, are replaced by copies. So an expression stays what its name
   tells when a user changes the list in place. What calls a user's function with one is not held: the function can
   change it, too (`calls`).
5. A name does not tell everything: a dict in another order gives the same one. What was made of such operands is found
   only by the same (`named`).
6. A user can change the empty frame of a collection in place (``ddf._meta``), its attributes and flags, too. That of an
   expression is looked at before it is found; when it was changed, everything is let go (`meta`). What was unpickled is
   not held: it comes with a name and an empty frame, and nothing says that they belong together.

Bounds: `limit` expressions and `MOST_FILES` files of their data sets, the least recently used go first; each keeps some
empty frames of at most `seam.MOST_COLUMNS` columns. An exception in here lets everything go, and leaves
planning to Dask from then on.

Rejected: a memory of whole plans by the query's expression (built and tried: it finds nothing for a query that differs
in its last step, nor for one that calls a function with a list or a dict, as all 22 of TPC-H do); a copy of empty
frames by name, put into new expressions (an attribute of theirs would be written).
"""

from __future__ import annotations

import collections
import logging
import threading
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.planning import files, seam, surroundings

if TYPE_CHECKING:
    from dask_gpurt.planning.seam import Instances

logger = logging.getLogger("distributed.client.gpurt")

#: expressions that are held at most, of some 11 kB each; the 22 queries of TPC-H and the steps of their plans are 4,636
LIMIT = 5_000
#: files of all data sets that they know, of 1 to 2 kB each. A program that asks for a growing folder over and over has
#: a new data set each time
MOST_FILES = 20_000


class HeldExpressions:
    """The expressions that one process holds.

    Parameters
    ----------
    limit
        Expressions at most; 1 or more.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit!r}, must be 1 or more")
        self.limit = limit
        #: lookups that found an expression that was held
        self.hits = 0
        #: expressions made anew
        self.made = 0
        #: times that all was let go since the surroundings, or an empty frame, had changed
        self.cleared = 0
        #: why nothing is held any more; None: nothing has failed
        self.failed: str | None = None
        # Reentrant: letting go of an expression may run finalisers, which may make others. Nothing that takes a token
        # runs under it: Dask has one lock for tokens, and while it is held expressions are looked up (an object of a
        # user's is unpickled). Two threads would wait for each other, and with them the loop of a scheduler in here.
        self._lock = threading.RLock()
        #: id -> (table of its kind, name, expression); the least recently used first
        self._held: collections.OrderedDict[int, tuple[Instances, str, Any]] = collections.OrderedDict()
        #: identity of a data set -> [expressions held that know it, its files], and the files of all
        self._data_sets: dict[int, list[int]] = {}
        self._files = 0
        self._tables: seam.Tables | None = None
        self._surroundings: Any = None

    @property
    def installed(self) -> bool:
        """Whether Dask's tables are ours now."""
        return self._tables is not None

    def install(self) -> bool:
        """Hold from now on. What was held at the last `uninstall` is found again; False if it cannot be done here."""
        with self._lock:
            if self._tables is not None or self.failed is not None:
                return self._tables is not None
            try:
                self._tables = seam.put(self)
            except SeamMismatch as e:
                self.failed = str(e)
                logger.info("planning is left to Dask: %s", e)
                return False
            return True

    def uninstall(self, *, hide: bool = False) -> None:
        """Put Dask's own tables back. What is held stays so for the next `install`; `clear` lets it go.

        `hide`: Dask's tables are without it, as if this had never been. A thread that plans meanwhile may then fail.
        """
        with self._lock:
            tables, self._tables = self._tables, None
            if tables is None:
                return
            tables.restore()
            if hide:
                for _, name, expression in self._held.values():
                    seam.drop(expression, name)

    def clear(self) -> None:
        """Let everything go. An expression that somebody else keeps is not found again either."""
        with self._lock:
            for table, name, _ in self._forget().values():
                table.pop(name, None)

    def figures(self) -> dict[str, int]:
        """Counts since the start of the process, and how many are held now."""
        return {"held": len(self._held), "hits": self.hits, "made": self.made, "cleared": self.cleared}

    # ------------------------------------------------------------------ called by the tables

    def look(self) -> None:
        """Before a lookup: let everything go if the surroundings are not what they were."""
        try:
            if not surroundings.same(self._surroundings):
                with self._lock:
                    if self._held:
                        self.cleared += 1
                    self.clear()
                    self._surroundings = surroundings.of_now()
        except Exception as e:
            self.fail(e)

    def found(self, table: Instances, name: str, expression: Any) -> None:
        """A lookup has found an expression."""
        key = id(expression)
        if key not in self._held and not self.judge(expression):
            return
        try:
            with self._lock:
                if key in self._held:
                    self.hits += 1
                    self._held.move_to_end(key)
                else:
                    self._hold(table, name, expression)
        except Exception as e:
            self.fail(e)

    def judge(self, expression: Any, *, new: bool = False) -> bool:
        """Whether an expression may be held; the answer is kept in it. `new`: it was just made.

        It may take a token, so no lock of ours is held.
        """
        try:
            return self.failed is None and seam.may_hold(expression, new=new)
        except Exception as e:
            self.fail(e)
            return False

    def add(self, table: Instances, name: str, expression: Any) -> None:
        """An expression was made, and judged."""
        try:
            with self._lock:
                self.made += 1
                if self.judge(expression):
                    self._hold(table, name, expression)
        except Exception as e:
            self.fail(e)

    def changed(self) -> None:
        """Somebody has changed the empty frame of an expression, and others may have theirs from it."""
        with self._lock:
            if self._held:
                self.cleared += 1
            self._forget()  # not from the tables: what others keep is found as ever

    def _hold(self, table: Instances, name: str, expression: Any) -> None:
        self._held[id(expression)] = table, name, expression
        self._count(expression, 1)
        while len(self._held) > self.limit or (self._files > MOST_FILES and len(self._held) > 1):
            self._count(self._held.popitem(last=False)[1][2], -1)

    def _count(self, expression: Any, by: int) -> None:
        """An expression is held, or is not any more: it may know a data set."""
        known = files.data_set(expression)
        if known is None:
            return
        identity, number = known
        entry = self._data_sets.setdefault(identity, [0, number])
        self._files += entry[1] * ((entry[0] == 0) - (entry[0] + by == 0))
        entry[0] += by
        if not entry[0]:
            del self._data_sets[identity]

    def _forget(self) -> collections.OrderedDict[int, tuple[Instances, str, Any]]:
        """What is held; then nothing is."""
        held, self._held = self._held, collections.OrderedDict()
        self._data_sets, self._files = {}, 0
        return held

    def fail(self, error: Exception) -> None:
        """Let everything go, and leave planning to Dask."""
        with self._lock:
            if self.failed is None:
                self.failed = f"{type(error).__name__}: {error}"
                logger.warning("expressions of queries are not held any more: %s", self.failed, exc_info=error)
            self.clear()


#: of this process
HELD = HeldExpressions()
