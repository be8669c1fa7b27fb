"""``local_cluster(gpus=...)``: which GPUs.

The workers are dask-cuda's, with its limits, pools and ``DeviceHostFile``. They are sent their part by the scheduler,
after dask-cuda has set them up: preloads of ours would come before that, and dask-cuda gives all preloads the arguments
of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.backends import dask_cuda
from dask_gpurt.errors import ConfigError, InstallError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def on_gpus(gpus: int | str | Sequence[int | str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a ``LocalCUDACluster``.

    Parameters
    ----------
    gpus
        As for `local_cluster`.
    options
        Of the user, for ``LocalCUDACluster``.

    Raises
    ------
    ConfigError
        `gpus` names what is not there.
    InstallError
        No GPU is visible.
    """
    if "CUDA_VISIBLE_DEVICES" in options:
        raise ConfigError("gpus and CUDA_VISIBLE_DEVICES both say which GPUs. Remedy: give gpus alone")
    visible, reason = dask_cuda.visible_gpus()
    if not visible:
        raise InstallError(
            f"gpus is {gpus!r}, and this process sees no GPU ({reason}). Remedy: `dask gpurt doctor` says what is "
            "missing; without gpus= the cluster needs none"
        )
    return {**options, "CUDA_VISIBLE_DEVICES": _chosen(gpus, visible)}


def _chosen(gpus: int | str | Sequence[int | str], visible: list[str]) -> list[str]:
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
