"""Processes of experiments: each with a limit of time, so that a fault ends only itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.data import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: distributions that decide what a GPU does, of any CUDA version
PACKAGES = (
    *(
        f"{name}-{cuda}"
        for name in ("rmm", "cudf", "pylibcudf", "ucxx", "libucx", "kvikio")
        for cuda in ("cu13", "cu12")
    ),
    *("dask-cuda", "cupy-cuda13x", "cuda-bindings", "dask", "distributed", "numpy", "pandas", "pyarrow"),
)


def apart(arguments: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run Python in a process of its own; what its last line says as JSON, or "failed" and why."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its workers, too, end with it
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # Python's own stacks first: SIGABRT has faulthandler write those of all threads.
            os.killpg(process.pid, signal.SIGABRT)
            try:
                _, errors = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                errors = ""
            _end(process.pid)
            return {"failed": f"not done within {seconds:g} s", "errors": _said(errors)}
        finally:
            _end(process.pid)  # workers that outlived it
    lines = out.splitlines()
    if process.returncode or not lines:
        last = (errors.strip().splitlines() or ["nothing was said"])[-1]
        return {"failed": f"exit {process.returncode}: {last[:300]}", "errors": _said(errors)}
    try:
        result: dict[str, Any] = json.loads(lines[-1])
    except ValueError:
        return {"failed": f"its last line is no JSON: {lines[-1][:300]}", "errors": _said(errors)}
    return result


def _said(errors: str) -> str:
    """The end of what was said, without the modules that faulthandler lists after its stacks."""
    return "\n".join(line for line in errors.splitlines() if not line.startswith("Extension modules:"))[-8000:]


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def hardware() -> list[str]:
    """What ``nvidia-smi`` says of the GPUs and their driver; one line that says why not."""
    query = (
        "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.width.current,mig.mode.current"
    )
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return [f"nvidia-smi: {type(e).__name__}"]
    return (done.stdout or done.stderr).strip().splitlines()
