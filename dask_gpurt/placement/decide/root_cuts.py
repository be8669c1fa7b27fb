"""How the roots of a graph are shared out among workers. Pure functions of a graph.

`share_out` cuts the roots that can start now into one contiguous piece per worker. `serialises` says when contiguous
pieces are wrong. `pays` and `by_input` serve the roots of a later phase. *Stock* means Dask's own choice.

`share_out`
-----------
1. *Interleave* (`interleaved`). The roots of each task group are laid side by side in proportion, so that every worker
   gets its share of each group. By priority alone, when a graph reads two sources one after the other, half of the
   workers would get all large chunks and the others all small ones.
2. *Follow the data* (`partner`). A root whose result is joined with data that a worker already holds goes to that
   worker, up to its share.
3. *Cut.* The rest is cut contiguously, first between nodes, then between the workers of each node. A cut near the
   border of a *cogroup* moves onto it. A cogroup is a set of roots that a later task joins, perhaps through chains of
   tasks with one input.

`serialises`
------------
Neighbouring roots on one worker save transfers. But where a graph passes through them one after the other (a cumulative
sum, the panels of a factorisation), their followers queue on one worker while the others idle. `serialises` compares,
level by level of the graph, the load of the busiest worker with an even spread. Measured on a cumulative sum of 128
chunks on 16 workers: 20.2 s with contiguous pieces, 12.0 s without.

In a level with more tasks than threads only half of the excess counts. There the pieces do not decide alone: each
decision weighs queues against bytes, and waiting tasks are stolen. In a narrow level nothing waits for long, but the
next level waits for it. Rejected: to count wide levels in full (pieces were refused to shifted sums and stencils that
run 5 % faster with them); not to count them (pieces were cut where one worker had twice its share of each level: 11 %
lost).

An even spread has its price, too: where a level joins tasks of several workers it waits for a message. Where the
tasks are so short that all the waiting of `serialises` takes less than these messages, pieces stay contiguous. A
cumulative sum of 32 chunks, each a millisecond's work, on four workers: 52 fetches and 1.05 s spread, 14 and 0.69 s
contiguous.
"""

from __future__ import annotations

import bisect
import itertools
import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_gpurt.placement.decide.root_times import ROUND_TRIP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from distributed.scheduler import TaskState

#: roots in a cogroup, at most
MAX_GROUP = 32
#: share of a piece by which its end moves to the border of a cogroup, at most
SNAP = 0.1
#: dependents of a root, and inputs of each of them, that are looked at for data to follow
MAX_FOLLOWED, MAX_PARTNERS = 4, 8
#: a root with more dependents than a block has roots is shared, if that is so many times the median of all roots
SHARED = 4
#: data with more copies than this is near every worker
WIDE = 8
#: inputs of a task that are looked at for the worker it will run on
MAX_VOTES = 8
#: a task may run anywhere if its inputs add up to less than this for each worker; an input counts 1 / its dependents
LEAST_VOTE = 0.1
#: contiguous pieces are refused when the levels of a graph take more than so many times an even spread
UNEVEN = 1.2

by_priority = attrgetter("priority")


class Member(NamedTuple):
    """A worker that gets a share of the roots."""

    address: str
    node: str
    #: its share, relative to the others'
    weight: float


def share_out(
    ordered: Sequence[TaskState], roots: Sequence[TaskState], members: Sequence[Member]
) -> tuple[list[list[Any]], set[Any]]:
    """Cut roots into one piece per member, the members being sorted by node, all TaskStates by priority.

    Returns
    -------
    (pieces, borders)
        The roots of each member, by priority; the roots with which a cogroup begins.
    """
    pieces: list[list[Any]] = [[] for _ in members]
    index = {m.address: i for i, m in enumerate(members)}
    total = sum(m.weight for m in members) or 1.0
    room = [math.ceil(len(roots) * m.weight / total) for m in members]
    rest = []
    for t in roots:
        i = index.get(partner(t) or "")
        if i is None or len(pieces[i]) >= room[i]:
            rest.append(t)
        else:
            pieces[i].append(t)
    sequence = interleaved(rest)
    border_positions = _borders(ordered, sequence)
    if len(rest) == len(roots):
        weights = [m.weight for m in members]
    else:
        weights = [float(r - len(p)) for r, p in zip(room, pieces, strict=True)]
    filled = [m._replace(weight=w) for m, w in zip(members, weights, strict=True)]
    for member, begin, end in _cuts(len(sequence), filled, border_positions):
        pieces[index[member.address]] += sequence[begin:end]
    for piece in pieces:
        piece.sort(key=by_priority)
    return pieces, {sequence[i] for i in border_positions}


def interleaved(roots: Sequence[TaskState]) -> list[Any]:
    """Roots of several groups side by side in proportion; the order within each group is kept."""
    groups: dict[Any, list[Any]] = {}
    for t in roots:
        groups.setdefault(t.group, []).append(t)
    if len(groups) < 2:
        return list(roots)
    placed = [
        ((i + 0.5) / len(members), number, t)
        for number, members in enumerate(groups.values())
        for i, t in enumerate(members)
    ]
    placed.sort(key=lambda p: p[:2])
    return [t for _, _, t in placed]


def partner(ts: TaskState) -> str | None:
    """Address of the worker with most of the data that a root's result is joined with; None: there is none.

    Data that is still to be computed does not count, nor data that many tasks read or many workers hold.
    """
    held = meets(ts)
    return max(held, key=held.__getitem__) if held else None


def meets(ts: TaskState) -> dict[str, float]:
    """Bytes of data in memory that a root's result is joined with, by address of the worker."""
    held: dict[str, float] = {}
    for d in itertools.islice(ts.dependents, MAX_FOLLOWED):
        for other in itertools.islice(d.dependencies, MAX_PARTNERS):
            if other is not ts and other.who_has:
                _count(other, held)
    return held


def _count(data: Any, held: dict[str, float]) -> None:
    holders = data.who_has
    if len(holders) <= WIDE and len(data.dependents) <= MAX_GROUP:
        nbytes = data.get_nbytes()
        for ws in holders:
            held[ws.address] = held.get(ws.address, 0.0) + nbytes


def pays(roots: Sequence[TaskState], members: int) -> bool:
    """Whether sharing out roots that read common data saves more bytes than it moves.

    Each worker with a piece gets a copy of what the piece reads. Left to the queue, the workers that have a copy
    already take more of the roots while the others wait for theirs. So a piece must save as much: by being joined with
    data where it runs, or by needing one input of several.
    """
    common = {d: float(d.get_nbytes()) for t in roots for d in itertools.islice(t.dependencies, MAX_PARTNERS)}
    if len(common) > 1:
        return True
    saved = sum(max(meets(t).values(), default=0.0) for t in roots)
    return saved > sum(common.values()) * (members - 1)


def by_input(roots: Sequence[TaskState]) -> list[Any]:
    """Roots that read the same data next to each other, so that contiguous pieces need few copies of it."""
    first: dict[Any, int] = {}
    keyed = []
    for number, t in enumerate(roots):
        own = max(t.dependencies, key=lambda d: d.get_nbytes(), default=None)
        keyed.append((first.setdefault(own, number), number, t))
    keyed.sort(key=lambda k: k[:2])
    return [t for _, _, t in keyed]


def beyond_even(roots: Iterable[TaskState], pieces: Sequence[Sequence[Any]]) -> float:
    """Roots that a worker holds for one join beyond its even share, at most.

    A task that joins roots needs all of them in memory. With contiguous pieces one worker holds them all; spread one by
    one, each worker holds its share.
    """
    joined: dict[Any, int] = {}
    for t in roots:
        for d in itertools.islice(t.dependents, MAX_FOLLOWED):
            joined[d] = joined.get(d, 0) + 1
    widest = max(joined.values(), default=1)
    longest = max(map(len, pieces), default=0)
    return max(0.0, min(widest, longest) - widest / max(1, len(pieces)))


def serialises(
    ordered: Sequence[TaskState],
    owner: Mapping[Any, int],
    threads: Sequence[float],
    free: Container[Any] = (),
    seconds: Callable[[Any], float | None] = lambda ts: None,
) -> bool:
    """Whether followers of contiguous pieces queue on few workers while others idle.

    Parameters
    ----------
    ordered
        TaskStates by priority, so that inputs come before what needs them.
    owner
        Root -> index of the worker that owns it.
    threads
        Of each worker.
    free
        Tasks that are shared out among all workers when they are ready: the roots of later phases.
    seconds
        ``(ts) -> s`` that a task is expected to take; None: not known.
    """
    level, load = _load_by_level(ordered, owner, free)
    in_all = sum(threads)
    uneven = even = 0.0
    #: by level: how many tasks one worker does after another while an even spread would be done
    excess = []
    for at_level in load:
        unplaced = at_level.pop(None, 0)
        width = unplaced + sum(at_level.values())
        spread = math.ceil(width / in_all)
        even += spread
        most = max((math.ceil(n / threads[i]) for i, n in at_level.items() if i is not None), default=spread)
        busiest = (most + spread) / 2 if width > in_all else most
        uneven += busiest
        excess.append(busiest - spread)
    return uneven > UNEVEN * even and not _sooner_than_messages(level, excess, seconds)


def _sooner_than_messages(
    level: Mapping[Any, int], excess: Sequence[float], seconds: Callable[[Any], float | None]
) -> bool:
    """Whether what `serialises` counts takes less time than the messages that an even spread waits for.

    One message for each level with a task of several inputs. False where the time of any task is unknown.
    """
    busy, width, joins = [0.0] * len(excess), [0] * len(excess), [False] * len(excess)
    for t, depth in level.items():
        one = seconds(t)
        if one is None:
            return False
        busy[depth] += one
        width[depth] += 1
        joins[depth] |= len(t.dependencies) > 1
    waited = sum(more * s / n for more, s, n in zip(excess, busy, width, strict=True))
    return waited < ROUND_TRIP_SECONDS * sum(joins)


def _load_by_level(
    ordered: Sequence[TaskState], owner: Mapping[Any, int], free: Container[Any]
) -> tuple[dict[Any, int], list[dict[int | None, int]]]:
    """Level of each task, and tasks of each worker at each level, when tasks follow their inputs. See `serialises`.

    The worker None stands for tasks that may run anywhere.
    """
    level: dict[Any, int] = {}
    runs_on: dict[Any, int] = dict(owner)
    #: by level: worker -> tasks; None: those that any worker may run
    load: list[dict[int | None, int]] = []
    for t in ordered:
        where = runs_on.get(t)
        dependencies = t.dependencies
        depth = 0
        if len(dependencies) == 1 and where is None:
            # As below, for most tasks of most graphs.
            (d,) = dependencies
            depth = level.get(d, -1) + 1
            at = runs_on.get(d)
            if at is not None and LEAST_VOTE * len(d.dependents) <= 1.0 and t not in free:
                where = runs_on[t] = at
        else:
            votes: dict[int, float] = {}
            anywhere = t in free
            for n, d in enumerate(dependencies):
                below = level.get(d)
                if below is not None and below >= depth:
                    depth = below + 1
                if where is None and n < MAX_VOTES and not anywhere and (at := runs_on.get(d)) is not None:
                    # An input that many tasks share says little about where each of them runs.
                    votes[at] = votes.get(at, 0.0) + 1.0 / len(d.dependents)
            if where is None and votes:
                # Among equals the one with less to do: stock decides likewise when the task is ready.
                there = load[depth] if depth < len(load) else {}
                most = max(votes, key=lambda i: (votes[i], -there.get(i, 0)))
                if votes[most] >= LEAST_VOTE:
                    where = runs_on[t] = most
        level[t] = depth
        if depth >= len(load):
            load += ({} for _ in range(depth + 1 - len(load)))
        at_level = load[depth]
        at_level[where] = at_level.get(where, 0) + 1
    return level, load


def _borders(ordered: Sequence[TaskState], roots: Sequence[TaskState]) -> list[int]:
    """Positions in `roots` at which a cogroup begins, ascending: where no join of few roots spans the gap before it."""
    position = {t: i for i, t in enumerate(roots)}
    reach: dict[Any, tuple[int, ...]] = {}
    #: +1 where a join begins to span gaps, -1 after it
    spans = [0] * (len(roots) + 1)
    joins = False
    for t in ordered:
        i = position.get(t)
        if i is not None:
            reach[t] = (i,)
            continue
        dependencies = t.dependencies
        if len(dependencies) == 1:
            # What follows one task joins nothing; most tasks of most graphs do.
            (d,) = dependencies
            if d in reach:
                reach[t] = reach[d]
            continue
        joined: set[int] = set()
        for d in dependencies:
            joined.update(reach.get(d, ()))
            if len(joined) > MAX_GROUP:
                break
        else:
            reach[t] = tuple(joined)
            if len(joined) > 1:
                spans[min(joined) + 1] += 1
                spans[max(joined) + 1] -= 1
                joins = True
    if not joins:
        return []
    return [i for i, open_joins in enumerate(itertools.accumulate(spans[:-1])) if not open_joins]


def _cuts(n: int, members: Sequence[Member], borders: Sequence[int]) -> Iterable[tuple[Member, int, int]]:
    """(member, begin, end): contiguous shares of `n` roots, by node and within it, `members` being sorted by node."""
    nodes = [(node, list(group)) for node, group in itertools.groupby(members, key=lambda m: m.node)]
    begin = 0
    ends = _ends(0, n, [sum(m.weight for m in group) for _, group in nodes], borders)
    for (_, group), end in zip(nodes, ends, strict=True):
        at = begin
        for member, stop in zip(group, _ends(begin, end, [m.weight for m in group], borders), strict=True):
            yield member, at, stop
            at = stop
        begin = end


def _ends(begin: int, end: int, weights: Sequence[float], borders: Sequence[int]) -> list[int]:
    total = sum(weights) or 1.0
    out: list[int] = []
    last = begin
    for weight, until in zip(weights, itertools.accumulate(weights), strict=True):
        at = max(last, begin + round((end - begin) * until / total))
        tolerance = SNAP * (end - begin) * weight / total
        i = bisect.bisect_left(borders, at)
        near = [b for b in borders[max(0, i - 1) : i + 1] if abs(b - at) <= tolerance and last <= b <= end]
        if near and at < end:
            at = min(near, key=lambda b: abs(b - at))
        out.append(at)
        last = at
    if out:
        out[-1] = end
    return out


def unshared(roots: list[TaskState], per_block: float) -> list[TaskState]:
    """Roots without those that are shared by many blocks of so many roots, see `SHARED`."""
    counts = [len(t.dependents) for t in roots]
    if max(counts) <= per_block:  # of most graphs: nothing is sorted
        return roots
    most = max(per_block, SHARED * sorted(counts)[len(counts) // 2])
    return [t for t, n in zip(roots, counts, strict=True) if n <= most]
