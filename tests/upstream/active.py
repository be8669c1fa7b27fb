"""A preload that logs, for each test and role, whether the extension's ``dask_setup`` ran and how it ended.

It stands before the extension in the preload list. distributed only logs an exception raised in ``dask_setup`` and
runs the server plain, so a suite could pass without the extension; and a test can start clusters in child processes
where no fixture can look. Hence the record is made where the call is made: on import this module replaces
``dask_setup`` of the extension's module by a wrapper that passes arguments, result and exception through unchanged.
The extension itself stays in the preload list, so its own code and configuration are those of a normal deployment.

Log: one JSON object per line, appended with one ``write`` (atomic below the pipe size on Linux), path in
``UPSTREAM_ACTIVE_LOG``: ``{"test": nodeid, "role": ..., "ok": bool, "error": text or null, "pid": int}``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import os
from typing import Any

#: Marks a wrapped function, so that a module imported twice is not wrapped twice.
_MARK = "_upstream_active"


def current_test() -> str:
    """The node id of the running test ("" outside of one); child processes inherit it from the environment."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]


def note(**record: Any) -> None:
    """Appends one record to the log; without ``UPSTREAM_ACTIVE_LOG`` there is nobody to tell."""
    path = os.environ.get("UPSTREAM_ACTIVE_LOG")
    if not path:
        return
    line = json.dumps({"test": current_test(), "pid": os.getpid(), **record}) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def role_of(server: Any) -> str:
    """``scheduler``, ``worker``, ``nanny``, ``client`` or the class name in lower case."""
    from distributed import Client, Nanny, Scheduler, Worker

    for cls, role in ((Scheduler, "scheduler"), (Worker, "worker"), (Nanny, "nanny"), (Client, "client")):
        if isinstance(server, cls):
            return role
    return type(server).__name__.lower()


def wrap(setup: Any) -> Any:
    """A function that calls ``setup``, logs how it ended and changes nothing else."""

    def done(server: Any, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError):
            return  # the test closed the server while it started: neither active nor at fault
        note(role=role_of(server), ok=error is None, error=None if error is None else repr(error))

    @functools.wraps(setup)
    def dask_setup(server: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = setup(server, *args, **kwargs)
        except BaseException as e:
            done(server, e)
            raise
        if inspect.isawaitable(result):
            return finish(server, result)
        done(server, None)
        return result

    async def finish(server: Any, awaitable: Any) -> Any:
        try:
            result = await awaitable
        except BaseException as e:
            done(server, e)
            raise
        done(server, None)
        return result

    setattr(dask_setup, _MARK, True)
    return dask_setup


def install(module: Any) -> None:
    """Wraps ``module.dask_setup``; a click command keeps its type and gets a wrapped callback.

    Raises AttributeError if the module has no ``dask_setup``: it could never be active.
    """
    setup = module.dask_setup
    if hasattr(setup, "callback"):
        if not getattr(setup.callback, _MARK, False):
            setup.callback = wrap(setup.callback)
    elif not getattr(setup, _MARK, False):
        module.dask_setup = wrap(setup)


if os.environ.get("UPSTREAM_EXTENSION"):
    install(importlib.import_module(os.environ["UPSTREAM_EXTENSION"]))
