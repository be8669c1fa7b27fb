"""What a simulated worker needs of its simulation, and of the other workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import collections
    import random
    from collections.abc import Sequence

    from dask.typing import Key

    from dask_gpurt.simulate.clock import VirtualLoop
    from dask_gpurt.simulate.memory import Store
    from dask_gpurt.simulate.model import Cluster
    from dask_gpurt.simulate.network import Network


class Peer(Protocol):
    """A worker, as others see it."""

    index: int
    address: str
    store: Store


class Surroundings(Protocol):
    """The clock, the network, the other workers, and the way to the scheduler."""

    loop: VirtualLoop
    cluster: Cluster
    network: Network
    random: random.Random
    #: bytes/s that is assumed before anything was measured
    bandwidth: float
    #: messages to workers that have no meaning here, by op
    ignored: collections.Counter[str]
    stolen: int

    @property
    def workers(self) -> Sequence[Peer]:
        """All of them, by index."""

    def size(self, key: Key) -> int:
        """Bytes of a result."""

    def duration(self, key: Key) -> float:
        """Seconds of a task on a worker of slowness 1."""

    def holders(self, key: Key) -> list[int]:
        """Workers that have a key."""

    def next_use(self, key: Key) -> tuple[float, ...] | None:
        """The priority of the first task that waits for a key; None without any."""

    def tell(self, op: str, worker: Peer, after: float | None = None, **message: object) -> None:
        """Send a message to the scheduler."""

    def moved(self, source: int, target: int, nbytes: int) -> None:
        """Bytes have come from one worker to another."""

    def memory_changed(self, nbytes: int) -> None:
        """Task data in memory has become so much more, or less."""

    def resides(self, worker: Peer, key: Key, tier: str | None, nbytes: int) -> None:
        """A key came to memory, went to disk, or left a worker."""

    def executed(self, key: Key, worker: int, start: float, stop: float, wasted: bool) -> None:
        """A task was run."""
