"""The private names of Dask that the meters and the queries need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

#: bytes of shards that stock's shuffle sent to this worker itself and to others
Sent = dict[str, int]


def watch_stock_shuffle() -> Sent:
    """Count what stock's shuffle sends, by whether it stays on its worker. Installs itself once per process."""
    from distributed.shuffle._comms import CommShardsBuffer

    known: Sent | None = getattr(CommShardsBuffer, "_gpurt_sent", None)
    if known is not None:
        return known
    sent = {"self": 0, "peers": 0}
    process = CommShardsBuffer.process

    async def counting(self: Any, id: str, shards: Any, size: int) -> None:
        run = self.send.__self__
        # A run of the extension passes through here too and counts for itself what its messages weigh.
        if type(run).__module__.startswith("distributed."):
            sent["self" if run.local_address == id else "peers"] += size
        await process(self, id, shards, size)

    CommShardsBuffer.process = counting
    CommShardsBuffer._gpurt_sent = sent
    return sent


def meta(frame: Any) -> pd.DataFrame:
    """The empty frame of a dask DataFrame: its columns and types."""
    return frame._meta
