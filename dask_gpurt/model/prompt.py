"""`PromptStream`: send what waits in one of Dask's batched streams at once, where somebody idles until it comes.

`tasks` does it for the stream from a scheduler to a worker, `results` for the one back, `graphs` for a client's. Each
installs, and returns the object whose `uninstall` gives the stream back.

Theory of operation. Dask sends at most one message per stream and interval: 5 ms from the scheduler to a worker, 2 ms
back, 10 ms from a client. What comes in between waits for the next. That is right under load, as a message costs both
sides more than a task in it. But a chain of dependent tasks on an idle cluster waits in every step, 5.9 ms per task of
which 2 are work. So a message is sent early if its receiver, or a thread of its sender, has nothing else to do:

* a task, if the worker has a thread that nothing in its hands will use;
* a result or an error, if a thread of the worker idles;
* a graph, always; and the wish to cancel, which must not fall behind the graph.

Early is not at once: only in the next turn of the event loop, so that all that follows from one event goes along.

Order and content of the messages stay Dask's. An exception in here leaves the stream to Dask.

Rejected: a shorter interval for all messages. With 0 it was as quick for chains; 6,000 short tasks took 6.1 instead of
3.7 s, since messages were small where no thread waited. Three or six turns of the loop instead of one, so that all that
arrives in that time goes along: no quicker, and no less processor time on busy clusters.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import safe_mode
from dask_gpurt.model.wrapped import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distributed import Client
    from distributed.batched import BatchedSend
    from distributed.scheduler import Scheduler, WorkerState
    from distributed.worker import Worker

logger = logging.getLogger("distributed.gpurt")

#: what is used of a stream
ATTRIBUTES = ("batch_count", "buffer", "loop", "next_deadline", "waker")
#: messages of a worker that may bring its idle threads something to do
OPENING = frozenset(("long-running", "request-refresh-who-has", "reschedule", "task-erred", "task-finished"))
#: messages of a client that somebody has asked for now
ASKING = frozenset(("cancel-keys", "update-graph"))


class PromptStream(Wrapped):
    """Sends the messages of one stream, of a live connection, early.

    ``urgent(messages just added)``, called on the stream's event loop: whether what waits is to be sent now.
    """

    def __init__(self, stream: BatchedSend, urgent: Callable[[tuple[Mapping[str, Any], ...]], bool]) -> None:
        self._stream = stream
        self._urgent = urgent
        self._pending = False
        #: messages sent before Dask's interval was over
        self.early = 0
        super().__init__(stream, "send")

    def install(self) -> None:
        """Send early from now on. A version of Dask whose streams are others keeps its intervals."""
        if missing := [name for name in ATTRIBUTES if not hasattr(self._stream, name)]:
            logger.info("messages wait for Dask's interval: a stream has no %s", ", ".join(missing))
            return
        super().install()

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        stream = self._stream

        def send(*messages: Mapping[str, Any]) -> None:
            stock(*messages)
            # No deadline: Dask sends at once.
            if stream.next_deadline is None or self._pending or not self._active:
                return
            try:
                if self._urgent(messages):
                    self._pending = True
                    stream.loop.asyncio_loop.call_soon(self._send_now)
            except Exception:
                self._active = False
                logger.exception("messages of %r wait for Dask's interval again", stream)

        return send

    def _send_now(self) -> None:
        self._pending = False
        stream = self._stream
        if stream.buffer and stream.next_deadline is not None and self._active:
            self.early += 1
            stream.next_deadline = None
            stream.waker.set()


def tasks(scheduler: Scheduler, ws: WorkerState, safe: Callable[[], bool]) -> PromptStream:
    """Send tasks to a worker as soon as it has a thread for them, but not while `safe`."""
    stream = scheduler.stream_comms[ws.address]
    #: of the messages that wait since batch `sent`: how many were looked at, and how many of them are tasks. Each is
    #: looked at once: a client that lets go of 50,000 futures has as many messages sent in one turn of the loop
    sent = looked = fresh = 0

    def urgent(messages: tuple[Mapping[str, Any], ...]) -> bool:
        nonlocal sent, looked, fresh
        in_hand = len(ws.processing) - len(ws.long_running)
        waiting = stream.buffer
        if in_hand - len(waiting) >= ws.nthreads:
            return False
        if stream.batch_count != sent or len(waiting) < looked:
            sent, looked, fresh = stream.batch_count, 0, 0
        fresh += sum(message["op"] == "compute-task" for message in waiting[looked:])
        looked = len(waiting)
        return fresh > 0 and in_hand - fresh < ws.nthreads and not safe()

    return _installed(PromptStream(stream, urgent))


def results(worker: Worker) -> PromptStream:
    """Send what a worker has to say of its tasks as soon as one of its threads idles, but not in safe mode."""
    state = worker.state

    def urgent(messages: tuple[Mapping[str, Any], ...]) -> bool:
        if len(state.executing) >= state.nthreads or "placement" in safe_mode.parts_of(worker):
            return False
        return any(message["op"] in OPENING for message in messages)

    return _installed(PromptStream(worker.batched_stream, urgent))


def graphs(client: Client, safe: Callable[[], bool] = lambda: False) -> PromptStream | None:
    """Send a client's graphs, and what it cancels, at once, but not while `safe`.

    None if it is not connected, or this has been done.
    """
    stream = client.scheduler_comm
    if stream is None or "send" in vars(stream):
        return None

    def urgent(messages: tuple[Mapping[str, Any], ...]) -> bool:
        return any(message["op"] in ASKING for message in messages) and not safe()

    return _installed(PromptStream(stream, urgent))


def _installed(prompt: PromptStream) -> PromptStream:
    prompt.install()
    return prompt
