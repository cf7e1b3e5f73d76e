"""A host in simulated time: prompts read piece by piece between steps, one step for all that generate.

Laws:
    1. Requests start in the order in which they came, but for those that are held; prompts are read one after the
       other, in the order in which they started.
    2. While others generate a prompt is read in pieces of a micro-batch with a step of all after each, else in batches.
    3. Equal turns are one addition: until something begins or ends, nothing is gone through token by token.
    4. A switch lets everything stand still for its pause, and for as long as it slows others down by.
    5. In a cache for all each token passes over what other requests hold; and a host adds its own to each step.

Not modelled: cells that run out, what idle sequences hold, and a sequence that loses what it holds; what a prompt finds
cached is its own number.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from splitctl.placement import SplitMode
from splitctl.planning.learned import Costs, other_than

#: Tokens of a piece while others generate, and else; llama.cpp's defaults.
N_UBATCH, N_BATCH = 512, 2048


#: A chain of times, the last one first.
Trail = tuple["Trail", float] | None


class Job:
    """One request on its way.

    Attributes:
        number: its number.
        came: when it came, s.
        n_unread: tokens of its prompt that are still to be read.
        n_held: tokens that its sequence holds.
        n_left: tokens that are still to be generated.
        began: when its sequence began to read it, s; negative: it waits.
        first: when its first token was there, s; negative: none is.
        ended: when its last token was there, s; negative: it is on its way.
    """

    __slots__ = ("began", "came", "ended", "first", "n_held", "n_left", "n_unread", "number")

    def __init__(self, number: int, came: float, n_unread: int, n_held: int, n_left: int) -> None:
        self.number, self.came = number, came
        # The last token of a prompt is always read: it gives the logits of the first token.
        self.n_unread, self.n_held, self.n_left = max(n_unread, 1), n_held, max(n_left, 1)
        self.began = self.first = self.ended = -1.0

    def copy(self) -> Job:
        """Give another one that is where this one is."""
        twin = Job.__new__(Job)
        twin.number, twin.came, twin.n_unread, twin.n_held = self.number, self.came, self.n_unread, self.n_held
        twin.n_left, twin.began, twin.first, twin.ended = self.n_left, self.began, self.first, self.ended
        return twin


class Floor:
    """What a host does, and since when nobody is there.

    Attributes:
        costs: what work takes.
        n_seq_max: sequences that there are.
        at: now, s.
        mode: the mode of the session.
        more_s: what the last switch adds to a step, s.
        switched_at: when the last switch ended, s.
        trail: when each switch began, s: the last one, behind those before it; None: none was made.
        queue: requests that wait, in the order in which they came.
        active: requests on sequences, in the order in which they started.
        idle_s: time in which nobody was there, s.
        empty_since: since when nobody is there, s.

    Lifetime: one thread's; `copy` shares nothing that changes.
    """

    __slots__ = (
        "active",
        "at",
        "costs",
        "empty_since",
        "idle_s",
        "mode",
        "more_s",
        "n_seq_max",
        "queue",
        "switched_at",
        "trail",
    )

    def __init__(self, costs: Costs, n_seq_max: int, at: float, mode: SplitMode) -> None:
        self.costs, self.n_seq_max, self.at, self.mode = costs, n_seq_max, at, mode
        self.more_s = self.idle_s = 0.0
        self.switched_at = -math.inf
        self.trail: Trail = None
        self.queue: list[Job] = []
        self.active: list[Job] = []
        self.empty_since = at

    def copy(self) -> Floor:
        """Give another one that is where this one is."""
        twin = Floor.__new__(Floor)
        twin.costs, twin.n_seq_max, twin.at, twin.mode = self.costs, self.n_seq_max, self.at, self.mode
        twin.more_s, twin.idle_s, twin.empty_since = self.more_s, self.idle_s, self.empty_since
        twin.switched_at, twin.trail = self.switched_at, self.trail
        # Nothing of a request changes before it starts.
        twin.queue = self.queue.copy()
        twin.active = [job.copy() for job in self.active]
        return twin

    @property
    def is_empty(self) -> bool:
        """Whether nobody is there."""
        return not self.queue and not self.active

    @property
    def n_held(self) -> int:
        """Tokens that the requests on sequences hold."""
        n = 0
        for job in self.active:
            n += job.n_held
        return n

    def come(self, job: Job) -> None:
        """Let a request come; it is not earlier than those before it."""
        if self.is_empty:
            self.idle_s += max(job.came - self.empty_since, 0.0)
            self.at = max(self.at, job.came)
        self.queue.append(job)

    def pause_s(self) -> float:
        """Give the pause of a switch now, s."""
        return self.costs.switch(self.mode, other_than(self.mode), self.n_held)[0]

    def cost_s(self) -> float:
        """Give what a switch now takes from who is served, s: its pause, and what it slows them down by."""
        return self.pause_s() + self.costs.slowed_s(self.mode)

    def switch(self) -> float:
        """Go to the other mode; gives what that takes from who is served, s."""
        after = other_than(self.mode)
        pause, more_ms = self.costs.switch(self.mode, after, self.n_held)
        seconds = pause + self.costs.slowed_s(self.mode)
        self.mode, self.more_s = after, more_ms / 1e3
        self.trail = self.trail, self.at
        self.at += seconds
        self.switched_at = self.at
        return seconds

    def run(self, until: float, held: Collection[int] = ()) -> list[Job] | None:
        """Go on until a prompt has been read, a request ends, or a time is reached at the end of a turn.

        Returns:
            Requests that have ended; None where there is nothing to do.
        """
        active = self.active
        if self.queue and len(active) < self.n_seq_max:
            self._start(held)
        if not active:
            return None
        reading: Job | None = None
        generating: list[Job] = []
        depth = total = 0
        for job in active:
            total += job.n_held
            if not job.n_unread:
                generating.append(job)
                depth += job.n_held
            elif reading is None:
                reading = job
        least = min([job.n_left for job in generating]) if generating else 1 << 60
        turns, n_read, seconds = self._turns(reading, generating, depth, total, least)
        if self.at + seconds > until and turns > 1:
            turns = max(min(math.ceil(turns * (until - self.at) / seconds), turns), 1)
            turns, n_read, seconds = self._turns(reading, generating, depth, total, turns)
        self.at += seconds
        return self._apply(reading, generating, turns, n_read)

    def _start(self, held: Collection[int]) -> None:
        n_free = self.n_seq_max - len(self.active)
        if held:
            starting = [one for one in self.queue if one.number not in held][:n_free]
            for job in starting:
                self.queue.remove(job)
        else:
            starting = self.queue[:n_free]
            del self.queue[:n_free]
        for job in starting:
            own = job.copy()
            own.began = self.at
            self.active.append(own)

    def _turns(
        self, reading: Job | None, generating: list[Job], depth: int, total: int, most: int
    ) -> tuple[int, int, float]:
        """Count the turns, at most so many, until one ends or is read: with the tokens read, and the seconds.

        Those who generate hold `depth` tokens together, and all who are on sequences `total`.
        """
        costs, g = self.costs, len(generating)
        seconds, n = 0.0, 0
        if reading is not None:
            piece = N_UBATCH if g else N_BATCH
            turns = min(-(-reading.n_unread // piece), most)
            n = min(turns * piece, reading.n_unread)
            seconds = costs.read_s(self.mode, n, reading.n_held)
            seconds += costs.others_s(self.mode, n * (total - reading.n_held + g * turns / 2), is_read=True)
        else:
            turns = most
        if g:
            step_s = costs.step_s(self.mode, g, depth / g + turns / 2) + self.more_s + costs.served_s(self.mode, g)
            # Every token passes over all but its own sequence's, as they are in the middle of these turns.
            pairs = turns * ((g - 1) * (depth + g * turns / 2) + g * (total - depth + n / 2))
            seconds += turns * step_s + costs.others_s(self.mode, pairs, is_read=False)
        return turns, n, seconds

    def _apply(self, reading: Job | None, generating: list[Job], turns: int, n_read: int) -> list[Job]:
        ended = []
        for job in generating:
            job.n_held += turns
            job.n_left -= turns
            if not job.n_left:
                job.ended = self.at
                self.active.remove(job)
                ended.append(job)
        if reading is not None:
            reading.n_unread -= n_read
            reading.n_held += n_read
            if not reading.n_unread:
                # Its first token is drawn from the logits of the prompt, at the end of this turn.
                reading.first = self.at
        if not (self.queue or self.active):
            self.empty_since = self.at
        return ended
