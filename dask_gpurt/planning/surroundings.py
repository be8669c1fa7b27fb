"""What planning depends on beside the expressions: Dask's and pandas' settings, a client, and functions of users.

`of_now` copies it, `same` says whether it is as it was, and `uses` notes a function of a user.
"""

from __future__ import annotations

import copy
import sys
import weakref
from typing import TYPE_CHECKING, Any

import dask.config
from distributed.client import _get_global_client
from pandas._config import using_string_dtype
from pandas._config.config import _global_config

if TYPE_CHECKING:
    import types

#: sections of Dask's configuration that planning reads
SECTIONS = ("dataframe", "optimization", "tokenize")
#: groups of pandas' options that types of results depend on; in its dict, as asking for some by their names warns
OPTIONS = ("future", "mode")

#: functions of users in what may be held, by id. A name tells where a function is, not what it does since a reload.
#: No WeakSet: one thread cannot walk over it while another adds to it.
_functions: weakref.WeakValueDictionary[int, types.FunctionType] = weakref.WeakValueDictionary()


def uses(function: types.FunctionType) -> bool:
    """Note a function of a user. False: it is not what its module has under its name, so it may not be held."""
    if not _is_current(function):
        return False
    _functions[id(function)] = function
    return True


def _is_current(function: types.FunctionType) -> bool:
    """Whether a function is what its module has under its name: not a local one, and the module was not reloaded."""
    return getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function


def of_now() -> tuple[Any, ...]:
    """What planning depends on; a copy. Functions that are no more are forgotten."""
    for function in _used():
        if not _is_current(function):
            _functions.pop(id(function), None)
    config = dask.config.config
    options = {name: dict(_global_config[name]) for name in OPTIONS}
    return copy.deepcopy({name: config.get(name) for name in SECTIONS}), options, *_others()


def same(before: tuple[Any, ...] | None) -> bool:
    """Whether it is as it was. Takes some 5 us, as it is asked at each lookup."""
    if before is None:
        return False
    config, known, options = dask.config.config, *before[:2]
    return (
        all(config.get(name) == known[name] for name in SECTIONS)
        and all(_global_config[name] == options[name] for name in OPTIONS)
        and before[2:] == _others()
        and all(map(_is_current, _used()))
    )


def _used() -> list[types.FunctionType]:
    return [function for ref in _functions.valuerefs() if (function := ref()) is not None]


def _others() -> tuple[Any, ...]:
    return _get_global_client() is not None, using_string_dtype()
