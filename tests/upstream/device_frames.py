"""The extension, with every pandas frame that could be a device frame shuffled as one, over the stand-in.

A preload for ``ci/upstream.sh --extension gpurt_upstream.device_frames``. The stand-in is ordinary memory
(`tests/backends/host_frames.py`): what is compared is the shuffle's code for device frames, and no GPU. Frames whose
types such frames do not have are shuffled as ever. A line for each shuffle, which of both it was and why, goes to the
file that `UPSTREAM_ACTIVE_LOG` names, with ``.device`` added.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[2])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)

import pandas as pd  # noqa: E402

from dask_gpurt.backends.frames import refused  # noqa: E402
from dask_gpurt.preload import dask_setup  # noqa: E402, F401
from dask_gpurt.shuffle.rows.assemble import general  # noqa: E402
from dask_gpurt.shuffle.spec import GpurtShuffleSpec  # noqa: E402
from tests.backends.host_frames import HostFrames, HostTable  # noqa: E402


class PlainFrames(HostFrames):
    """Takes pandas frames, and gives them."""

    def owns(self, frame: object) -> bool:
        """Whether it is a pandas frame."""
        return isinstance(frame, pd.DataFrame)

    def frame(self, table: HostTable, meta: pd.DataFrame) -> Any:
        """A pandas frame like the meta."""
        out = general([self._get(table)], meta)
        assert not self.memory.faults, self.memory.faults
        return out


def _say(text: str) -> None:
    if path := os.environ.get("UPSTREAM_ACTIVE_LOG"):
        with open(path + ".device", "a") as f:
            f.write(text + "\n")


if not hasattr(GpurtShuffleSpec, "_upstream"):
    _made = GpurtShuffleSpec.of
    _SIGNATURE = inspect.signature(_made)

    def _of(*args: Any, **kwargs: Any) -> GpurtShuffleSpec:
        given = _SIGNATURE.bind(*args, **kwargs)
        spec = given.arguments["spec"]
        why = refused(spec.meta, spec.column)
        _say(why or "device frames")
        if not why:
            given.arguments["frames"] = f"{__name__}:PlainFrames"
        return _made(*given.args, **given.kwargs)

    GpurtShuffleSpec.of = staticmethod(_of)  # type: ignore[method-assign,assignment]
    GpurtShuffleSpec._upstream = True  # type: ignore[attr-defined]
