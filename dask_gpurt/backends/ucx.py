"""UCX through ucxx: context, worker, endpoints and tag-matched messages, for one thread.

What is set and why: error handling on every endpoint (else a dead peer is never noticed), ``MM_ERROR_HANDLING``
(without it error handling excludes shared memory), ``KEEPALIVE_INTERVAL`` 1 s (a killed peer is noticed in under a
second instead of twenty), ``RNDV_THRESH`` auto (importing ucxx sets a value for GPUs, which costs a third of the
bandwidth of shared memory). Not asyncio: ucxx's own waits by spinning on the event loop.

Everything here belongs to the thread that made the `UcxWorker`, in the process that made it: UCX does not survive a
fork.
"""

from __future__ import annotations

import os
from typing import Any

from dask_gpurt.backends.ucx_device import has_device

# Else UCX complains, on stdout, of variables that importing ucxx sets. Read when its library is loaded.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")


def available() -> str:
    """``""`` when UCX can be used here, else why not. Imports ucxx."""
    try:
        import ucxx._lib.libucxx  # noqa: F401
    except Exception as e:  # a missing shared library raises what it likes
        return f"{type(e).__name__}: {e}. Remedy: pip install 'dask-gpurt[ucx]', which brings CUDA libraries"
    return ""


class UcxWorker:
    """A UCX context of our own, with one worker."""

    def __init__(self) -> None:
        import ucxx._lib.libucxx as lib
        from ucxx._lib.arr import Array
        from ucxx.types import Tag, TagMaskFull

        self._lib, self._array, self._tag, self._full = lib, Array, Tag, TagMaskFull
        options = {"MM_ERROR_HANDLING": "y", "KEEPALIVE_INTERVAL": "1s", "RNDV_THRESH": "auto"}
        if not has_device():
            options["RNDV_FRAG_MEM_TYPE"] = "host"
        self._context = lib.UCXContext(options)
        self._worker = lib.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self._pid = os.getpid()
        #: what peers need to reach this worker
        self.address: bytes = self._worker.address.tobytes()
        #: readable when there is something to progress, after `arm`
        self.fileno: int = self._worker.epoll_file_descriptor

    def progress(self) -> bool:
        """Do what there is to do without waiting; whether anything was done."""
        if os.getpid() != self._pid:
            raise RuntimeError("UCX was used after a fork. Remedy: start workers by spawn or forkserver")
        any_done = False
        while self._worker.progress_once():
            any_done = True
        return any_done

    def keepalive(self) -> None:
        """Let UCX look whether peers are alive; to be called a few times a second.

        UCX looks on every 32nd progress only, and a thread that sleeps in epoll hardly progresses.
        """
        for _ in range(64):
            self._worker.progress_once()

    def arm(self) -> bool:
        """Whether the descriptor may be waited for; False: call `progress` first."""
        return bool(self._worker.arm())

    def endpoint(self, address: bytes) -> Any:
        """An endpoint to a worker; raises when there is no way to it."""
        peer = self._lib.UCXAddress.create_from_buffer(address)
        return self._lib.UCXEndpoint.create_from_worker_address(self._worker, peer, True)

    def send(self, endpoint: Any, buffer: Any, tag: int) -> Any:
        """A request; the buffer must stay until it is completed."""
        return endpoint.tag_send(self._array(buffer), self._tag(tag))

    def receive(self, endpoint: Any, buffer: Any, tag: int) -> Any:
        """A request; cancelled when the endpoint is closed."""
        return endpoint.tag_recv(self._array(buffer), self._tag(tag), self._full)

    def waiting(self, tag: int) -> int | None:
        """Bytes of a message with this tag that no receive was posted for; None without one."""
        found = self._worker.tag_probe(self._tag(tag))
        return int(found.length) if found.matched else None

    def receive_waiting(self, buffer: Any, tag: int) -> Any:
        """Receive a message that `waiting` has found."""
        return self._worker.tag_recv(self._array(buffer), self._tag(tag), self._full)

    def close(self) -> None:
        """Let everything go; call it after the endpoints are closed."""
        self._worker.cancel_inflight_requests()
        self.progress()
