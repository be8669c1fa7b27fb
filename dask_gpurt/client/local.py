"""`local_cluster`: a `distributed.LocalCluster` with the extension, which says in one line why it did not start.

With ``gpus`` it is dask-cuda's ``LocalCUDACluster``: the workers are dask-cuda's, with its limits, pools and
``DeviceHostFile``. They are sent their part by the scheduler, after dask-cuda has set them up: preloads of ours would
come before that, and dask-cuda gives all preloads the arguments of its own.

Dask's own error for any failed start is "Cluster failed to start: Scheduler failed to start." or "Nanny failed to
start."; the reason is its cause, some tracebacks above.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import dask.config
from dask.utils import parse_timedelta
from distributed import LocalCluster, SpecCluster
from distributed.core import Status

from dask_gpurt import planning
from dask_gpurt.backends import dask_cuda
from dask_gpurt.config import Settings
from dask_gpurt.config_schema import flat, write
from dask_gpurt.errors import ConfigError, InstallError
from dask_gpurt.extension.parts import PRELOAD, PRELOADS, require_assertions, require_device_tier, require_folders
from dask_gpurt.observe.dashboard import hook
from dask_gpurt.placement.decide import policy

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from typing import Self

#: what is mostly behind a worker's process that ends before it has said anything
_UNGUARDED = (
    ". Remedy: the output above has the error of that process; a script must create clusters below "
    '`if __name__ == "__main__":`'
)

#: a nanny may take so long to start a worker again
_STARTS_SECONDS = 300.0
#: states of a nanny's process from the end of one to the registration of the next one's worker
_AWAY = (Status.stopping, Status.stopped, Status.starting)


def local_cluster(
    *,
    settings: Mapping[str, Any] | None = None,
    gpus: int | str | Sequence[int | str] | None = None,
    **kwargs: Any,
) -> LocalCluster:
    """A `distributed.LocalCluster` with the extension on its scheduler and, before they register, its workers.

    Parameters
    ----------
    settings
        Dotted keys to values, such as ``{"tiers.host-limit": 0.5}``, or nested as in YAML; they win over YAML and the
        environment.
    gpus
        One worker for each of so many GPUs, for these (indices or UUIDs) or for ``"all"`` that this process sees: a
        ``LocalCUDACluster`` of dask-cuda, which takes `kwargs`. The scheduler sends its workers their part. None: no
        GPU is looked for.
    **kwargs
        As for `distributed.LocalCluster`. Preloads given there, or else in Dask's configuration, run before ours. With
        ``asynchronous=True`` the cluster is to be awaited, which raises as below.

    Raises
    ------
    ConfigError
        An unknown setting, or a value that is not allowed; `tiers.device` is "on", and `kwargs` ask for something that
        leaves no device tier. Nothing was started.
    InstallError
        This interpreter runs without assertions (``python -O``), there is no GPU or no dask-cuda for `gpus`, a part
        could not be installed, or Dask could not start the cluster. What was started is closed.
    """
    # Here, where the caller sees what is wrong, rather than in a child process.
    loaded = Settings.load(settings)
    if loaded.policy != "stock":
        if loaded.on_error != "stock":
            require_assertions()
        policy.load(loaded.policy)
        require_folders(loaded.tiers.folders)
        planning.keep()
    argv: list[str] = []
    for key, value in flat(settings or {}).items():
        argv += ["--gpurt-" + key.replace(".", "-"), write(key, value)]
    scheduler_kwargs = dict(kwargs.pop("scheduler_kwargs", None) or {})
    _add_preload("scheduler", scheduler_kwargs, argv)
    cluster: type[LocalCluster] = GpurtLocalCluster
    if gpus is None:
        _add_preload("worker", kwargs, argv)
    else:
        if loaded.tiers.device == "on" and loaded.tiers.enabled:
            require_device_tier(dask_cuda.asked(kwargs))
        cluster = type("GpurtLocalCUDACluster", (GpurtLocalCluster, dask_cuda.local_cuda_cluster()), {})
        kwargs["CUDA_VISIBLE_DEVICES"] = _visible(gpus, kwargs)
    # Again: the body of the preload runs once per process, and `dask.config.refresh` forgets what it announced.
    hook.announce()
    return cluster(scheduler_kwargs=scheduler_kwargs, **kwargs)


class GpurtLocalCluster(LocalCluster):
    """A `LocalCluster` whose failed start closes all of it and raises the reason, and that is patient with nannies.

    Dask's closes a nanny whose worker has been away for ``distributed.deploy.lost-worker-timeout``, also while it
    starts the worker again. Nothing does that any more then: if all workers were killed on a busy machine, their tasks
    wait for ever.
    """

    def __init__(self, **kwargs: Any) -> None:
        try:
            super().__init__(**kwargs)
            if not self.asynchronous:
                # dask-cuda starts its workers after this class's own, and only logs it when one fails.
                self.sync(self._workers_started)
        except (RuntimeError, TimeoutError) as e:
            if e.__cause__ is None and not isinstance(e, InstallError):
                raise  # of the constructor: nothing was started
            self.close()  # ends the thread of the event loop, which Dask leaves
            reason = _reason(e)
            raise reason from reason.__cause__
        except KeyboardInterrupt:
            if getattr(self, "status", None) is Status.starting:  # it would go on beside all that the user does next
                self.close()
            raise
        except Exception:  # dask-cuda finds wrong arguments after it has started a scheduler, too
            if getattr(self, "status", None) is Status.running:
                self.close()
            raise

    async def _workers_started(self) -> None:
        """Raise what kept a worker from starting, as the cause of a RuntimeError as Dask does."""
        for worker in self.workers.values():
            try:
                await worker
            except Exception as e:
                raise RuntimeError("a worker failed to start") from e

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op != "remove":
            super()._update_worker_status(op, msg)
            return
        name = self.scheduler_info["workers"][msg]["name"]
        super(SpecCluster, self)._update_worker_status(op, msg)
        self._look_later(name, time.monotonic() + _STARTS_SECONDS)

    def _look_later(self, name: Any, deadline: float) -> None:
        timeout = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
        asyncio.get_running_loop().call_later(timeout, self._close_lost, name, deadline)

    def _close_lost(self, name: Any, deadline: float) -> None:
        """As Dask's, but look again later while the nanny starts a worker."""
        nanny = self.workers.get(name)
        if nanny is None or any(worker["name"] == name for worker in self.scheduler_info["workers"].values()):
            return
        process = getattr(nanny, "process", None)
        starts = nanny.status is Status.running and process is not None and process.status in _AWAY
        if starts and time.monotonic() < deadline:
            self._look_later(name, deadline)
        else:
            del self.workers[name]
            self._futures.add(asyncio.ensure_future(nanny.close()))

    def __await__(self) -> Generator[Any, Any, Self]:
        try:
            yield from super().__await__()
            yield from self._workers_started().__await__()
        except (RuntimeError, TimeoutError) as e:
            closing = self.close()
            if closing is not None:
                yield from closing.__await__()
            reason = _reason(e)
            raise reason from reason.__cause__
        return self


def _reason(error: BaseException) -> InstallError:
    """The error of ours that is behind one of Dask's, else one with the first error of all."""
    first = error
    while not isinstance(first, InstallError):
        # A nanny that cannot make a process asserts its state in vain; what the system said comes before.
        cause = first.__cause__ or (first.__context__ if isinstance(first, AssertionError) else None)
        if cause is None:
            remedy = _UNGUARDED if "failed to start worker process" in str(first) else ""
            reason = InstallError(f"the cluster did not start: {type(first).__name__}: {first}{remedy}")
            reason.__cause__ = error
            return reason
        first = cause
    return InstallError(str(first))


def _add_preload(role: str, kwargs: dict[str, Any], argv: list[str]) -> None:
    """Append our module to the preloads of `kwargs`, whichever of Dask's forms they have.

    What is given to a server wins over Dask's configuration, so what is there is repeated.
    """
    modules = kwargs.get("preload") or dask.config.get(f"distributed.{role}.preload") or []
    modules = [modules] if isinstance(modules, str) else list(modules)
    argvs = list(kwargs.get("preload_argv") or dask.config.get(f"distributed.{role}.preload-argv") or [])
    if not argvs or isinstance(argvs[0], str):
        argvs = [argvs] * len(modules)
    if len(argvs) != len(modules):
        raise ConfigError(
            f"the preloads of the {role} are {modules!r}, and their arguments {argvs!r}; there must be one list of "
            "arguments for each, or one for all"
        )
    pairs = list(zip(modules, argvs, strict=True))
    others = [pair for pair in pairs if pair[0] not in PRELOADS]
    mine = [a for module, given in pairs if module in PRELOADS for a in given]
    kwargs["preload"] = [*(module for module, _ in others), PRELOAD]
    kwargs["preload_argv"] = [*(given for _, given in others), [*mine, *argv]]


def _visible(gpus: int | str | Sequence[int | str], options: Mapping[str, Any]) -> list[str]:
    """The GPUs that `gpus` names, of a cluster with these `options` of the user; errors as of `local_cluster`."""
    if "CUDA_VISIBLE_DEVICES" in options:
        raise ConfigError("gpus and CUDA_VISIBLE_DEVICES both say which GPUs. Remedy: give gpus alone")
    visible, reason = dask_cuda.visible_gpus()
    if not visible:
        raise InstallError(
            f"gpus is {gpus!r}, and this process sees no GPU ({reason}). Remedy: `dask gpurt doctor` says what is "
            "missing; without gpus= the cluster needs none"
        )
    if gpus == "all":
        return visible
    if isinstance(gpus, int) and not isinstance(gpus, bool) and 1 <= gpus <= len(visible):
        return visible[:gpus]
    if isinstance(gpus, (list, tuple, range)) and gpus:
        chosen = [str(gpu) for gpu in gpus]
        known = set(visible)
        if len(set(chosen)) == len(chosen) and all(gpu in known or gpu.startswith(("GPU-", "MIG-")) for gpu in chosen):
            return chosen
    raise ConfigError(
        f"gpus is {gpus!r}, and this process sees {len(visible)} ({', '.join(visible)}). It must be a number from 1 to "
        f"{len(visible)}, a list of different ones of these or of their UUIDs, or 'all'"
    )
