"""Columns of Parquet files that a worker keeps while memory is free, so that they are not decoded again.

Theory of operation. A query that comes again, or another one over the same table, reads the same columns. Decoding them
is two fifths of the processor time of TPC-H's queries at scale 1; to make a frame of a decoded column is nearly free
where its type is Arrow's. So `cache.ReadCache` keeps columns, as Arrow has them, below Dask's conversion to pandas.
What Dask makes of them is the same as ever, and what is kept cannot be changed: Arrow's arrays are immutable.

- *Evidence first.* A column is kept when it is read for the second time. What reads everything once has nothing kept.
- *Spare memory only.* `tiers.worker.memory_watch` says how much may be kept: a share of the worker's limit, while the
  process takes less than half of it. It goes before any value does.
- *Never stale.* `files.stamp` opens the file at each read, as reading it does, and compares what the system says of it.
  A file that changed in the last seconds is not kept: within one tick of the clock it may change again, unseen.
- *Scans do not flush it.* What is kept stays until four times as much as may be kept was read without a use of it.

`seam` is where Dask's reading is asked. Only files of local file systems, also mounted ones, are kept. One cache serves
all workers of a process.
"""
