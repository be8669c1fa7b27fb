"""Whether the filter of a join is worth making: `pays`. Pure.

Theory of operation. A filter costs its making, per key, and a look at every row to come. What it saves is the splitting
and encoding of the rows that it drops; that is measured, as hashing is, in CPU seconds of these workers. Sending,
receiving, assembling and merging a row take several times as long as splitting it, and are the margin: so a filter that
pays by this sum pays clearly.

The share of rows that pass is estimated by a sample of the rows that came by so far. A wrong estimate costs time, never
a row: what is dropped is decided by the filter, and a filter that drops too little is given up (`worker.join_filter`).
"""

from __future__ import annotations

#: CPU seconds of setting the bits of a key, or of reading them: one access to memory that is in no cache, and a dozen
#: steps of numpy. Measured: 4 to 17 ns
PROBE_SECONDS = 10e-9
#: share of an input's rows that a filter has to drop, by a sample, before all of them are looked up: looking a row up
#: takes a sixteenth of splitting and encoding it, or more
LEAST_DROPPED = 1 / 16
#: CPU seconds of asking all workers one question, where they are few
QUESTION_SECONDS = 2e-3


def worth_asking(keys: int) -> bool:
    """Whether a sample is asked about before a filter of so many keys is made: if making it takes longer."""
    return keys * PROBE_SECONDS > QUESTION_SECONDS


def pays(keys: int, to_come: float, passing: float, hash_seconds: float, split_seconds: float) -> bool:
    """Whether a filter saves more than it costs.

    Parameters
    ----------
    keys
        Rows of the side that it is made of.
    to_come
        Rows of the other side that are not split yet.
    passing
        Share of them that it does not drop.
    hash_seconds, split_seconds
        CPU seconds of hashing a row, and of splitting and encoding one.
    """
    cost = keys * PROBE_SECONDS + to_come * (hash_seconds + PROBE_SECONDS)
    return to_come * (1 - passing) * split_seconds > cost
