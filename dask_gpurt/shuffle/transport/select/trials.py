"""Learn by trials which of several ways is faster. Pure: events and times in, a name out.

`Contest.pick` gives the way of the next message. `Meter` measures the ways.

Theory of operation. Seconds from the hand-over of a message to its acknowledgement say little: ten messages are under
way at a time and wait for each other, so the same way looks ten times slower under traffic than one message alone. What
counts is bytes over *busy time*: the time in which messages of a way are under way, shared by bytes where several are
(`Meter`).

Speeds of different minutes cannot be compared: a slow network, a busy peer or a full store slows all ways. So ways
are compared in *trials*, as a benchmark would do it: several messages in a row go by another way, and their speed is
divided by that of the usual one in as many messages before and after. Only such ratios move a score; the usual way
alone, however slow it gets, moves nothing.

What a trial costs is known in advance, from the scores: nothing is tried before `COST` of the time since the last
trial pays for it. One that shows a faster way is repeated at once, until the scores agree with it or it was noise.

Rejected: one message in 64 by another way (1.6 % of them without end, at five times the cost each on a slow way, and a
lone message among ten of another way says nothing about ten of its own); rates learned from all traffic, with the
others scaled by them (a burst on a busy machine moved whole shuffles to the slower way and back).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: share of the time that trials may cost
COST = 0.01
#: until a way was tried for the first time: what is known of it then was measured on another machine
FIRST_COST = 0.03
TRIAL_MESSAGES = 16
TRIAL_BYTES = 64 << 20
#: messages between trials, at least, in lengths of a trial; between one that showed a faster way and the next
PAUSE, AGAIN = 8, 2
#: a way must have shown itself so much faster before it becomes the usual one: below that a change gains nothing
MARGIN = math.log(1.03)
#: what one trial may say, at most: a burst of anything else on the machine lasts as long as a trial
_CLAMP = math.log(4)
#: weight of a trial, at least: old ones fade
_GAIN = 0.25


@dataclasses.dataclass(slots=True)
class _WayFlow:
    flying: int = 0
    flying_bytes: int = 0
    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Meter:
    """Bytes and busy time of flows that share what they run on."""

    def __init__(self) -> None:
        self._flows: dict[tuple[str, int], _WayFlow] = {}
        self._flying: dict[tuple[str, int], _WayFlow] = {}
        self._at = 0.0

    def flow(self, key: tuple[str, int]) -> _WayFlow:
        """The figures of a flow, made on first use."""
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _WayFlow()
        return flow

    def begun(self, key: tuple[str, int], nbytes: int, now: float) -> None:
        """Enter a message that is under way from now on."""
        self._share(now)
        flow = self.flow(key)
        flow.flying += 1
        flow.flying_bytes += nbytes
        self._flying[key] = flow

    def ended(self, key: tuple[str, int], nbytes: int, now: float, stored: bool = True) -> None:
        """Enter that a message is stored, or is not and never will be."""
        self._share(now)
        flow = self.flow(key)
        flow.flying -= 1
        flow.flying_bytes -= nbytes
        if not flow.flying:
            self._flying.pop(key, None)
        if stored:
            flow.messages += 1
            flow.nbytes += nbytes

    def _share(self, now: float) -> None:
        passed, self._at = now - self._at, now
        if not self._flying or passed <= 0:
            return
        if len(self._flying) == 1:
            for flow in self._flying.values():
                flow.seconds += passed
            return
        # At least a byte: a message of none takes time, too.
        whole = sum(flow.flying_bytes + 1 for flow in self._flying.values())
        for flow in self._flying.values():
            flow.seconds += passed * (flow.flying_bytes + 1) / whole


@dataclasses.dataclass(slots=True)
class _Mark:
    """A flow as it was."""

    messages: int
    nbytes: int
    seconds: float

    @classmethod
    def of(cls, flow: _WayFlow) -> _Mark:
        return cls(flow.messages, flow.nbytes, flow.seconds)

    def rate(self, flow: _WayFlow) -> float:
        """Bytes per second since then; 0: not known."""
        seconds = flow.seconds - self.seconds
        return (flow.nbytes - self.nbytes) / seconds if seconds > 0 else 0.0


@dataclasses.dataclass(slots=True)
class _Trial:
    usual: str
    rival: str
    #: messages that it has, and that are still to be handed out
    messages: int
    left: int
    #: the usual way before the trial, and the rival at its start
    before: _Mark
    start: _Mark
    #: messages of the usual way that were stored when the last one of the trial was; -1: that was not yet
    after: int = -1


class Contest:
    """The ways of messages of about one size.

    Parameters
    ----------
    scores
        Expected speed of each way; only ratios count.
    size
        Which messages, as the meter knows them.
    """

    def __init__(self, scores: Mapping[str, float], meter: Meter, size: int) -> None:
        self._scores = {name: math.log(max(speed, 1.0)) for name, speed in scores.items()}
        self._tried = dict.fromkeys(self._scores, 0)
        self._meter, self._size = meter, size
        self._ways: tuple[str, ...] = ()
        self.usual = ""
        self._trial: _Trial | None = None
        #: messages of a trial, as long as messages are now
        self._length = TRIAL_MESSAGES
        #: messages so far, and when the next trial is due; of which way
        self._count, self._due, self._rival = 0, 0, ""
        #: way -> messages when it was tried last
        self._last = dict.fromkeys(self._scores, 0)
        self._marks: tuple[_Mark, _Mark] | None = None

    def pick(self, ways: tuple[str, ...], nbytes: int) -> str:
        """The way of the next message, of those there are now."""
        if ways != self._ways:
            self._ways = ways
            self._length = self._length_for(nbytes)
            self._settle()
        self._count += 1
        trial = self._trial
        if trial is not None:
            if trial.left:
                trial.left -= 1
                return trial.rival
        elif self._rival and self._count >= self._due:
            self._begin()
        elif self._count % self._length == 0:
            self._length = self._length_for(nbytes)
            now = self._mark()
            self._marks = (now if self._marks is None else self._marks[1]), now
        return self.usual

    def ended(self) -> None:
        """Look at the trial under way: a message was stored, and the meter has it."""
        trial = self._trial
        if trial is None or trial.left:
            return
        if trial.after < 0:
            rival = self._meter.flow((trial.rival, self._size))
            if rival.messages - trial.start.messages >= trial.messages:
                trial.after = self._meter.flow((trial.usual, self._size)).messages
        elif self._meter.flow((trial.usual, self._size)).messages - trial.after >= trial.messages:
            self._finish(trial)

    def give_up(self, name: str) -> None:
        """A message by this way was not stored: a trial with it says nothing."""
        if self._trial is not None and name in (self._trial.usual, self._trial.rival):
            self._settle()

    @staticmethod
    def _length_for(nbytes: int) -> int:
        return max(2, min(TRIAL_MESSAGES, TRIAL_BYTES // max(nbytes, 1)))

    def _mark(self) -> _Mark:
        return _Mark.of(self._meter.flow((self.usual, self._size)))

    def _settle(self, again: str = "") -> None:
        """Choose the usual way, and when which other one is tried; `again`: that one, soon."""
        self._trial = self._marks = None
        best = max(self._ways, key=self._scores.__getitem__)
        if self.usual not in self._ways or self._scores[best] > self._scores[self.usual] + MARGIN:
            self.usual = best
        due = {name: self._last[name] + self._length * self._pause(name) for name in self._ways if name != self.usual}
        self._rival = again or min(due, key=due.__getitem__, default="")
        if self._rival:
            least = self._count + self._length * (AGAIN if again else PAUSE)
            self._due = least if again else max(least, int(due[self._rival]))

    def _pause(self, name: str) -> float:
        """Lengths of a trial that pay for one of this way: what it takes longer, over what it may cost."""
        slower = math.expm1(max(0.0, self._scores[self.usual] - self._scores[name]))
        return slower / (COST if self._tried[name] else FIRST_COST)

    def _begin(self) -> None:
        before = self._mark() if self._marks is None else self._marks[0]
        rival = self._meter.flow((self._rival, self._size))
        self._last[self._rival] = self._count
        self._trial = _Trial(self.usual, self._rival, self._length, self._length, before, _Mark.of(rival))

    def _finish(self, trial: _Trial) -> None:
        usual = trial.before.rate(self._meter.flow((trial.usual, self._size)))
        rival = trial.start.rate(self._meter.flow((trial.rival, self._size)))
        again = ""
        if usual > 0 and rival > 0:
            self._tried[trial.rival] += 1
            shown = max(-_CLAMP, min(_CLAMP, math.log(rival / usual)))
            gain = max(_GAIN, 1 / (self._tried[trial.rival] + 0.5))
            target = self._scores[trial.usual] + shown
            self._scores[trial.rival] += gain * (target - self._scores[trial.rival])
            if shown > MARGIN and self._scores[trial.rival] <= self._scores[trial.usual] + MARGIN:
                again = trial.rival
        self._settle(again)
