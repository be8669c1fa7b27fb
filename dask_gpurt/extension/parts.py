"""`Parts`: what is installed in one process, and how it leaves again.

All or nothing: parts are installed in order. When one fails, those before it are taken out again, in reverse, before
the error leaves. With ``gpurt.on-error: stock`` only the failing part is left to Dask. Installing twice does nothing.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import dask
import distributed

from dask_gpurt.backends import cuda
from dask_gpurt.doctor import compat
from dask_gpurt.errors import ConfigError, InstallError
from dask_gpurt.tiers.device.coexistence import decide

if TYPE_CHECKING:
    import logging
    from collections.abc import Awaitable, Callable, Sequence

    from dask_gpurt.backends.dask_cuda import DeviceSetup
    from dask_gpurt.config import Settings

#: what ``--preload`` is given
PRELOAD = "dask_gpurt.preload"
#: modules that load the extension
PRELOADS = (PRELOAD, "dask_gpurt.load", "dask_gpurt")
#: name of both plugins, and of the entry in ``worker.metrics``
NAME = "gpurt"


def require_assertions() -> None:
    """Refuse an interpreter that leaves out assertions.

    Raises
    ------
    InstallError
        It does: distributed's P2P shuffles would hang.
    """
    if not __debug__:
        raise InstallError(
            "this process runs without assertions (python -O, or PYTHONOPTIMIZE is set), must run with them: the P2P "
            "shuffles of distributed need what its assert statements do, and hang without. Remedy: start the scheduler "
            "and the workers without -O, and unset PYTHONOPTIMIZE"
        )


def require_folders(folders: Sequence[str]) -> None:
    """Refuse folders for spilled data of which none can be used, as workers on this machine will find.

    Raises
    ------
    ConfigError
        They cannot be made, or this user may not write to them.
    """
    failed = []
    for folder in folders:
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # permissions alone do not say: root, a mount that is read-only
                return
        except (OSError, ValueError) as e:  # the latter of a null byte
            failed.append(str(e))
    if failed:
        raise ConfigError(
            f"gpurt.tiers.directory is {', '.join(map(repr, folders))}, which cannot be used: {'; '.join(failed)}. "
            "Remedy: a folder that this user may write to, or null for the worker's local directory"
        )


def require_device_tier(setup: DeviceSetup) -> None:
    """Refuse what dask-cuda is asked to set up where the device tier is asked for too, and would stay off.

    Raises
    ------
    ConfigError
        It would, with the reason.
    """
    decision = decide(setup, "on")
    if not decision.works:
        raise ConfigError(f"gpurt.tiers.device is 'on', and there would be no tier: {decision}")


class Parts:
    """What is installed in one process, in order, each with the way to take it out."""

    def __init__(self, settings: Settings, logger: logging.Logger) -> None:
        self.settings = settings
        self.logger = logger
        #: part name -> "on", "off" or "off: why"
        self.state: dict[str, str] = {}
        self._undo: list[tuple[str, Callable[[], Awaitable[None]]]] = []

    def permitted(self) -> bool:
        """Whether anything may be installed in this process. Warns of versions that were not tested together.

        Raises
        ------
        InstallError
            The interpreter leaves out assertions. Not with ``on-error: stock``, where Dask is left as it was.
        """
        try:
            require_assertions()
        except InstallError as e:
            if self.settings.on_error != "stock":
                raise
            self.state["assertions"] = f"off: {e}"
            self.logger.warning("dask-gpurt: nothing is installed (gpurt.on-error: stock). %s", e)
            return False
        settings = self.settings
        uses_gpu = settings.tiers.device == "on" or settings.shuffle.device_frames or cuda.has_context()
        compat.warn_once(self.logger, "cuda" if uses_gpu else "cpu")
        return True

    async def add(
        self, name: str, install: Callable[[], Awaitable[Callable[[], Awaitable[None]]]], *, wanted: bool = True
    ) -> None:
        """Install one part; `install` returns the way to take it out.

        One that is not `wanted` is left out with a warning when it fails: observation is not worth an installation.

        Raises
        ------
        Exception
            What the part raised; all parts installed so far were taken out. Not with ``on-error: stock``, where the
            part is left to Dask with a warning.
        """
        try:
            undo = await install()
        except Exception as e:
            self.state[name] = f"off: {e}"
            if not wanted:
                self.logger.warning("dask-gpurt: %s is not available: %r", name, e, exc_info=True)
                return
            if self.settings.on_error == "stock":
                self.logger.warning("dask-gpurt: %s is left to stock Dask (gpurt.on-error: stock). %s", name, e)
                return
            await self.remove()
            raise
        self.state[name] = "on"
        self._undo.append((name, undo))

    async def remove(self) -> None:
        """Take everything out, last first.

        Raises
        ------
        InstallError
            A part refused to leave (a shuffle is running); it and those below it stay in.
        ExceptionGroup
            Parts failed while leaving; that did not keep the others in.
        """
        failed: list[Exception] = []
        while self._undo:
            name, undo = self._undo[-1]
            try:
                await undo()
                self.state[name] = "off"
            except InstallError:
                raise
            except Exception as e:
                self.logger.exception("dask-gpurt: removing %s failed", name)
                self.state[name] = f"off: removal failed: {e}"
                failed.append(e)
            self._undo.pop()
        if failed:
            raise ExceptionGroup("parts of dask-gpurt could not be removed cleanly", failed)


def versions() -> str:
    """Of what we run on, for the line at the start."""
    return f"dask {dask.__version__}, distributed {distributed.__version__}"
