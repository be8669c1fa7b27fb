"""`RowKind`: how the partitions of one run are taken apart and put together. `PandasRows` is that of pandas.

Theory of operation. The worker's part of a run moves shards: rows of one input for neighbouring outputs of one worker.
What a shard's rows are, only its kind knows: an Arrow table here, packs of device memory in `device_rows`. Credit,
recovery, late binding, retaining and storing are the same for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.shuffle.rows import coalesce, wire
from dask_gpurt.shuffle.rows.assemble import Assembler
from dask_gpurt.shuffle.rows.message_cut import cut
from dask_gpurt.shuffle.rows.partition import copied, split
from dask_gpurt.shuffle.rows.pickled_columns import fixed_in
from dask_gpurt.shuffle.rows.received_chunk import ReceivedChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import numpy as np
    import pandas as pd

    from dask_gpurt.shuffle.rows.packed import Adopt
    from dask_gpurt.shuffle.rows.partition import OutputLayout, Shard
    from dask_gpurt.shuffle.rows.wire import Parcel


class RowKind(Protocol):
    """What a run does with rows. Any thread."""

    @property
    def frame(self) -> str:
        """Name of the class of its partitions."""

    @property
    def on_host(self) -> bool:
        """Whether values and memory of partitions can be looked at on the host."""

    def owns(self, data: object) -> bool:
        """Whether it can split an input partition."""

    def split(
        self,
        data: Any,
        input_id: int,
        layout: OutputLayout,
        *,
        keep: np.ndarray[Any, Any] | None = None,
        direct: Collection[str] = (),
    ) -> Iterable[tuple[str, Shard]]:
        """(worker address, shard), one or several in a row for every worker that gets rows of an input.

        Parameters
        ----------
        keep
            Mask of rows; those outside of it may be left out. None: all rows.
        direct
            Workers that take rows in device memory, where partitions lie there.
        """

    def encoder(self) -> Callable[[Shard], list[Parcel]]:
        """Cuts and encodes shards of one input; their ids go on from the shard's."""

    def copied(self, shard: Shard, input_id: int) -> Shard:
        """The rows of a shard in memory of their own, under another id."""

    @property
    def adopt(self) -> Adopt | None:
        """Makes a pack of a frame that came on the device; None: none may."""

    def few(self, shard: Shard) -> bool:
        """Whether a received shard should wait for others to be merged with."""

    def merged(self, shards: Iterable[Shard]) -> list[Shard]:
        """Shards merged with each other."""

    def chunk(self, shards: Sequence[Shard], nbytes: int | None) -> Any:
        """A `model.Chunk` of them, with a `chunk_id` that sorts and identifies the chunks of one run."""

    def assemble(self, pieces: list[Any], /) -> Any:
        """An output from the pieces that chunks gave, in any order; empties the list.

        Raises
        ------
        MemoryError
            Of rows on a device, the list is as it was.
        """


class PandasRows:
    """`RowKind` of pandas.

    Parameters
    ----------
    meta
        Empty input partition.
    column
        Name of its column of output ids.
    drop_column
        Whether outputs are without it.
    cut_bytes
        Bytes of a shard that travels in one message, at most.
    """

    frame = "pandas.DataFrame"
    on_host = True
    adopt: Adopt | None = None
    copied = staticmethod(copied)
    few = staticmethod(coalesce.worth)
    merged = staticmethod(coalesce.merged)
    chunk = staticmethod(ReceivedChunk)

    def __init__(self, meta: pd.DataFrame, column: str, drop_column: bool, cut_bytes: int) -> None:
        self._column, self._drop_column, self._cut_bytes = column, drop_column, cut_bytes
        self._fixed = fixed_in(meta)
        self.assemble: Callable[[list[Any]], pd.DataFrame] = Assembler(
            meta.drop(columns=column) if drop_column else meta
        )

    def owns(self, data: object) -> bool:
        """Whether it is a pandas frame."""
        import pandas as pd

        return isinstance(data, pd.DataFrame)

    def split(
        self,
        data: pd.DataFrame,
        input_id: int,
        layout: OutputLayout,
        *,
        keep: np.ndarray[Any, Any] | None = None,
        direct: Collection[str] = (),
    ) -> Iterable[tuple[str, Shard]]:
        """See `partition.split`."""
        return split(data, self._column, self._drop_column, input_id, layout, self._fixed, keep)

    def encoder(self) -> Callable[[Shard], list[Parcel]]:
        """See `RowKind`; the schema is looked up for the first shard."""
        schema: tuple[int, bytes] | None = None

        def encode(shard: Shard) -> list[Parcel]:
            nonlocal schema
            schema = schema or wire.schema_bytes(shard.table.schema)
            return [wire.encode(piece, schema) for piece in cut(shard, self._cut_bytes)]

        return encode
