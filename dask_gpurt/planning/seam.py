"""The private names of Dask that holding expressions needs: the tables of its singletons, looked at before each use.

`put` replaces the tables, `Tables.restore` puts them back; `may_hold` says which expressions may live on.

The tables are attributes of classes. There is no object of a client's own to put them on, as the expressions of a
process are shared by all of its clients. So this is the one place that changes classes: of the client's process, and
only their tables. Each class that exists gets one of its own, as a name is unique within a class only.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import functools
import sys
import threading
import types
import weakref
from typing import Any, Protocol

import dask
import numpy as np
import pandas as pd
from dask._task_spec import Dict
from dask.delayed import DelayedLeaf
from dask.tokenize import _tokenize_deterministic
from dask.utils import itemgetter, methodcaller

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.planning import calls, files, meta, named, surroundings

#: packages whose functions and classes are not loaded a second time
LIBRARIES = frozenset(
    (
        *("builtins", "collections", "dask", "datetime", "decimal", "distributed", "functools", "numpy", "operator"),
        *("pandas", "pyarrow"),
    )
)
#: items of an operand, and characters or bytes of one of them
MOST_ITEMS = 256
MOST_CHARACTERS = 4_096
_DEPTH = 10
#: rows of a frame that only tells types; some have one or two
MOST_ROWS = 2
#: columns of one; each takes 0.4 kB in every expression
MOST_COLUMNS = 100

#: module -> kinds of expressions that may be held
KINDS: dict[str, frozenset[str]] = {
    f"dask.dataframe.dask_expr.{module}": frozenset(names.split())
    for module, names in {
        "_expr": "Add And AsType Assign ColumnsSetter Div Drop EQ Fillna Filter FinalizeComputeDF GE GT Index "
        "Invert IsNa Isin LE LT MapPartitions Mod Mul NE NotNull Or Projection RenameFrame RenameSeries "
        "ResetIndex Round Sub ToFrame Where XOr _DelayedExpr",
        "_accessor": "FunctionMap PropertyMap",
        "_groupby": "DecomposableGroupbyAggregation GroupByChunk GroupbyAggregation",
        "_merge": "BlockwiseMerge BroadcastJoin HashJoinP2P Merge",
        "_reductions": "Aggregate Chunk Count DropDuplicates Len Max Mean MeanAggregate Min NLargest NSmallest "
        "ShuffleReduce Sum TreeReduce ValueCounts",
        "_repartition": "Repartition RepartitionToFewer",
        "_shuffle": "AssignPartitioningIndex P2PShuffle RearrangeByColumn Shuffle TaskShuffle",
        "io.io": "FusedIO FusedParquetIO",
        "io.parquet": "ReadParquetFSSpec ReadParquetPyarrowFS",
    }.items()
}

_TEXTS = (str, bytes)
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    np.generic,
    np.dtype,
    pd.api.extensions.ExtensionDtype,
    pd.Timestamp,
    pd.Timedelta,
    decimal.Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    enum.Enum,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    np.ufunc,
)

#: operands that can change, or hold something that can
_CHANGING = (*calls.CHANGING, tuple, functools.partial, itemgetter)

#: what Dask puts into what it knows of a data set as a user gave it
_GIVEN = frozenset(("categories", "filters", "index", "kwargs"))
#: what an expression computes when it is asked for the first time, and keeps, that contains its operands
_COMPUTED = ("args", "_args", "_kwargs", "agg_args", "aggregate_args", "by", "spec", "_meta")


class Holder(Protocol):
    """What the tables report to."""

    def look(self) -> None:
        """Before a lookup."""

    def found(self, table: Instances, name: str, expression: Any) -> None:
        """A lookup has found an expression."""

    def judge(self, expression: Any, *, new: bool = False) -> bool:
        """Whether an expression may be held; the answer is kept in it."""

    def add(self, table: Instances, name: str, expression: Any) -> None:
        """An expression was made."""

    def changed(self) -> None:
        """Somebody has changed the empty frame of an expression."""

    def fail(self, error: Exception) -> None:
        """Something in here has failed."""


class Instances(weakref.WeakValueDictionary[str, Any]):
    """The table of one class: Dask's own kind, which reports lookups to `held`."""

    def __init__(self, held: Holder, known: weakref.WeakValueDictionary[str, Any] | None) -> None:
        super().__init__()
        _copy(known, self)
        self._gpurt_held = held
        self._gpurt_asked = threading.local()

    def __contains__(self, name: Any) -> bool:
        self._gpurt_held.look()
        try:
            found = self._unchanged(name, sys._getframe(1))
        except Exception as e:
            self._gpurt_held.fail(e)
            found = self.get(name)
        # Dask asks for it next. Until then another thread may let it go, so this thread keeps it.
        self._gpurt_asked.expression = found
        return found is not None

    def _unchanged(self, name: Any, asker: types.FrameType) -> Any:
        """The expression of a name, if it is still what the name says."""
        found = self.get(name)
        if found is not None and meta.is_changed(found):
            # As in Dask it is found as long as somebody else keeps it.
            found = None
            self._gpurt_held.changed()
            found = self.get(name)
        # The one that Dask has just made is a variable of the function that asks.
        if found is not None and named.is_untold(found) and not named.alike(found, asker.f_locals.get("inst")):
            return None
        return found

    def __getitem__(self, name: str) -> Any:
        asked = vars(self._gpurt_asked).pop("expression", None)
        expression = asked if asked is not None and asked._name == name else super().__getitem__(name)
        self._gpurt_held.found(self, name, expression)
        return expression

    def __setitem__(self, name: str, expression: Any) -> None:
        # Before another thread can find it.
        if sys._getframe(1).f_locals.get("_determ_token") is None:
            self._gpurt_held.judge(expression, new=True)
            super().__setitem__(name, expression)
            self._gpurt_held.add(self, name, expression)
        else:  # unpickled with a name, and with operands and an empty frame that may have been changed since
            vars(expression)["_gpurt_may_hold"] = False
            super().__setitem__(name, expression)


class Tables:
    """The tables that were put in place."""

    def __init__(self) -> None:
        self._put: list[tuple[type, Instances]] = []

    def put(self, cls: type, held: Holder) -> None:
        """Give a class a table of ours."""
        ours = _kept.get(cls)
        if ours is None:
            ours = _kept[cls] = Instances(held, vars(cls).get("_instances"))
        self._put.append((cls, ours))
        type.__setattr__(cls, "_instances", ours)

    def restore(self) -> None:
        """Give each class a table of Dask's kind, with what is in ours. One that other code has put over ours is left.

        Also a class that had none before: another thread may be making an expression of it, and has seen ours.
        """
        for cls, ours in self._put:
            if vars(cls).get("_instances") is ours:
                table: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
                _copy(ours, table)
                type.__setattr__(cls, "_instances", table)
        self._put.clear()


def drop(expression: Any, name: str) -> None:
    """Take an expression out of the table that its class has now."""
    table = vars(type(expression)).get("_instances")
    if table is not None:
        table.pop(name, None)


def _copy(source: weakref.WeakValueDictionary[str, Any] | None, target: weakref.WeakValueDictionary[str, Any]) -> None:
    # By a list that is made in one step: other threads may change the table meanwhile.
    for ref in () if source is None else source.valuerefs():
        expression = ref()
        if expression is not None:
            weakref.WeakValueDictionary.__setitem__(target, expression._name, expression)


#: class -> our table, which is used again by the next `put`
_kept: weakref.WeakKeyDictionary[type, Instances] = weakref.WeakKeyDictionary()


def put(held: Holder) -> Tables:
    """Give each kind of expression that exists now, and may be held, a table that reports to `held`.

    Raises
    ------
    SeamMismatch
        Dask has no such tables; nothing was changed.
    """
    try:
        from dask._expr import SingletonExpr
        from dask.dataframe.dask_expr._expr import Expr
    except ImportError as e:
        raise SeamMismatch(f"Dask {dask.__version__} has no expressions that are looked up by name: {e}") from e
    if int(pd.__version__.partition(".")[0]) < 3:
        # Two collections have one empty frame, and a user who changes it in place changes both.
        raise SeamMismatch(f"pandas {pd.__version__} does not copy on write, as pandas 3 does")
    annotation = str(SingletonExpr.__annotations__.get("_instances"))
    if "WeakValueDictionary" not in annotation or not issubclass(Expr, SingletonExpr):
        raise SeamMismatch(
            f"Dask {dask.__version__} keeps its expressions in {annotation or 'nothing'}, expected a "
            "WeakValueDictionary in SingletonExpr._instances"
        )
    if "_instances" in vars(SingletonExpr) or "_instances" in vars(Expr):
        raise SeamMismatch("all kinds of expressions share one table, in which names may be taken twice")
    tables = Tables()
    for cls in _subclasses(Expr):
        # Dask makes no singletons of classes with a constructor.
        own = any("__init__" in vars(base) for base in cls.__mro__[:-1])
        if cls.__name__ in KINDS.get(cls.__module__, ()) and not own:
            tables.put(cls, held)
    return tables


def _subclasses(cls: type) -> set[type]:
    out: set[type] = set()
    left: list[type] = [cls]
    while left:
        below: list[type] = left.pop().__subclasses__()
        for sub in below:
            if sub not in out:
                out.add(sub)
                left.append(sub)
    return out


def may_hold(expression: Any, *, new: bool = False) -> bool:
    """Whether an expression, and all that it is made of, may live on without its owner. `new`: it was just made."""
    known: bool | None = expression.__dict__.get("_gpurt_may_hold")
    if known is None:
        # By its kind first: to take the token of a frame in memory with 10,000 futures once more takes long.
        cls = type(expression)
        known = cls.__name__ in KINDS.get(cls.__module__, ()) and (new or _is_as_named(expression))
        # In the dict, as the class takes attributes for operands. Dask pickles only what its own class names.
        known = expression.__dict__["_gpurt_may_hold"] = known and _may_hold(expression, new)
    return known


def _is_as_named(expression: Any) -> bool:
    """Whether the operands of an expression that was made before us are still those that its name tells."""
    token = expression.deterministic_token
    expression._determ_token = None
    try:
        return bool(expression.deterministic_token == token)
    finally:
        expression._determ_token = token


def _may_hold(expression: Any, new: bool) -> bool:
    from dask._expr import Expr

    if not calls.may_hold(expression):
        return False
    maps = calls.maps(expression)
    names = type(expression)._parameters
    others: list[int] = []  # places of operands that are neither plain nor expressions; most have none
    for i, operand in enumerate(expression.operands):
        if type(operand) in named.ATOMS and (type(operand) not in _TEXTS or len(operand) <= MOST_CHARACTERS):
            continue
        if isinstance(operand, Expr):
            if not may_hold(operand):
                return False
            continue
        others.append(i)
        if i < len(names) and names[i] in named.DATA_SET:
            known = operand if isinstance(operand, dict) else {}
            if known and not files.may_hold(expression, known):
                return False
            if (found := files.data_set(expression)) is not None and found[1] > files.MOST:
                return False
            if known and expression.operand("columns") is None and not _is_small(known["base_meta"]):
                return False
            if known and not new and meta.labels(known["base_meta"]) != meta.NO_LABELS:
                return False  # they may be a user's, of which the name tells nothing
        elif not _is_plain(operand, users=maps):
            return False
    _take(expression, others)
    meta.note(expression)
    if not new:
        # It may have computed these before, and they contain the operands as they were.
        for name in _COMPUTED:
            vars(expression).pop(name, None)
    named.has_untold(expression, among=others)
    return True


def _take(expression: Any, places: list[int]) -> None:
    """Give an expression copies of the operands in some places, where they can change.

    They may be a user's own list or dict. Changed in place, it would no longer be what the name tells, and the next
    query that asks for that name would get the changed one.
    """
    for i in places:
        operand = expression.operands[i]
        if i < len(expression._parameters) and expression._parameters[i] in named.DATA_SET:
            for name in _GIVEN.intersection(operand if isinstance(operand, dict) else ()):
                operand[name] = _copied(operand[name])
            continue
        if isinstance(operand, DelayedLeaf):
            leaf = DelayedLeaf(copy.deepcopy(operand._obj), operand.key, pure=operand._pure, nout=operand._nout)
            expression.operands[i] = leaf
        elif isinstance(operand, _CHANGING):
            expression.operands[i] = _copied(operand)


def _copied(operand: Any) -> Any:
    # Nine in ten are of the first kinds, and a deep copy takes ten times as long.
    if type(operand) in (list, tuple) and named.ATOMS.issuperset(map(type, operand)):
        return operand[:]
    if type(operand) is Dict and not operand.args:
        return operand
    return copy.deepcopy(operand)


def _is_plain(value: Any, users: bool, depth: int = 0) -> bool:
    """Whether an operand is small, holds nothing of a user's, and always means the same.

    `users`: a function of a user's will do, as nothing calls it while a query is planned.
    """

    def of(part: Any) -> bool:
        return _is_plain(part, users, depth + 1)

    if not isinstance(value, type) and not _is_of_a_library(type(value)):
        return False  # a text or a number of a user's class may have more in it than its name tells
    if isinstance(value, _TEXTS):
        return len(value) <= MOST_CHARACTERS
    if isinstance(value, _PLAIN):
        return not isinstance(value, types.BuiltinFunctionType) or isinstance(
            value.__self__, types.ModuleType | type | None
        )
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return not any(isinstance(v, _CHANGING) for v in parts) and of(parts)
    if isinstance(value, type):
        return _is_of_a_library(value)
    if isinstance(value, types.FunctionType):
        if value.__closure__ is not None or not of(value.__defaults__ or ()):
            return False
        return _is_of_a_library(value) or (users and surroundings.uses(value))
    if isinstance(value, pd.DataFrame | pd.Series | pd.Index):
        return _is_small(value)
    if depth > _DEPTH:
        return False
    if isinstance(value, dict):
        return len(value) <= MOST_ITEMS and all(of(k) and of(v) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) <= MOST_ITEMS and all(map(of, value))
    if isinstance(value, functools.partial):
        return of((value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        return isinstance(value.__self__, type) and _is_of_a_library(value.__self__)
    if isinstance(value, DelayedLeaf):
        if depth or not of(value._obj):  # deeper down `_take` would not look for it
            return False
        # A name of a user's says nothing of the object. This is what Dask calls the values of an `isin`.
        return bool(value.key == f"delayed-{_tokenize_deterministic(value._obj)}")
    if isinstance(value, Dict):
        return of(value.args)
    if isinstance(value, itemgetter):
        return of(value.index)
    if isinstance(value, np.ndarray):
        return value.size <= MOST_ITEMS and of(value.tolist())
    return isinstance(value, methodcaller)


def _is_small(frame: Any) -> bool:
    """Whether a frame has few rows, and so few columns that it can be had for each expression that is held."""
    return len(frame) <= MOST_ROWS and (frame.ndim < 2 or frame.shape[1] <= MOST_COLUMNS)


def _is_of_a_library(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in LIBRARIES
