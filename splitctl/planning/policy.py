"""When a host switches by itself: seconds of known work in each mode, against those of the switch.

Laws:
    1. No clock and no chance: times come in, and the same calls give the same decisions.
    2. A switch is never asked for within `min_stay_s` of the last one, nor within the backoff after a failed one.
    3. A prompt is held for `max_wait_s` at most since it came.
    4. While streams generate, no switch is asked for whose pause is longer than `max_pause_s`.

`planning/learned.py` has what a policy goes by: `Costs`, `costs_of`, `costs_of_rates`, `Learned` and `Answers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from splitctl.errors import ConfigInvalid
from splitctl.placement import SplitMode
from splitctl.planning.learned import Costs

#: No setting is longer than a week [s].
_MAX_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds of a policy.

    Attributes:
        min_stay_s: least time between two switches, s.
        max_wait_s: longest time that a prompt is held, s.
        max_pause_s: longest pause of a switch while streams generate, s.
        hysteresis: share of a switch's cost that it has to save on top of the cost.
        backoff_s: no switch for so long after a failed one, s; twice as long after each further one.
        max_backoff_s: longest backoff, s.

    Raises:
        ConfigInvalid: a number is negative or longer than a week, or the backoff is longer than its bound.
    """

    min_stay_s: float = 2.0
    max_wait_s: float = 20.0
    max_pause_s: float = 5.0
    hysteresis: float = 0.25
    backoff_s: float = 30.0
    max_backoff_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if not 0.0 <= value <= _MAX_S:
                raise ConfigInvalid(name, value, f"a number from 0 to {_MAX_S:g}")
        if self.backoff_s > self.max_backoff_s:
            raise ConfigInvalid("backoff_s", self.backoff_s, f"at most max_backoff_s, {self.max_backoff_s:g} s")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that is on no sequence yet.

    Attributes:
        number: its number.
        n_uncached: tokens of its prompt that have to be read.
        n_cached: tokens that the sequence it will be on holds already.
        n_expected: tokens that its answer is expected to have.
        waited_s: time since it came, s.
    """

    number: int
    n_uncached: int
    n_cached: int
    n_expected: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Active:
    """A request on a sequence.

    Attributes:
        number: its number.
        n_unread: tokens of its prompt that are still to be read; 0: it generates.
        n_held: tokens that its sequence holds.
        n_expected: tokens that are expected still to come.
    """

    number: int
    n_unread: int
    n_held: int
    n_expected: float


@dataclass(frozen=True, slots=True)
class Situation:
    """What a host has before it.

    Attributes:
        at: now, s, on any clock that only goes forward.
        mode: the mode that the session is in.
        waiting: requests without a sequence, in the order in which they came.
        active: requests on sequences, in the order in which they are read.
        n_seq_max: sequences that there are.
    """

    at: float
    mode: SplitMode
    waiting: tuple[Waiting, ...] = ()
    active: tuple[Active, ...] = ()
    n_seq_max: int = 4


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now.

    Attributes:
        mode: the mode to be in; another than the situation's: switch now.
        hold: numbers of waiting requests that are not to be started yet; the others start in their order.
        look_again_s: ask again after so many seconds, if nothing happens before; None: no need.
        sentence: why, for a person.
        numbers: what it was decided by: seconds and counts by name.
    """

    mode: SplitMode
    hold: frozenset[int]
    look_again_s: float | None
    sentence: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class Policy:
    """Decides when to switch.

    Ask it whenever a request comes, is read or ends, and when `look_again_s` is over; tell it what was served and of
    every switch. Thread: one at a time.
    """

    def __init__(self, costs: Costs, settings: Settings | None = None) -> None:
        self.costs = costs
        self.settings = settings or Settings()

    def decide(self, situation: Situation) -> Decision:
        """Say which mode to be in, and which requests to hold."""
        return Decision(situation.mode, frozenset(), None, f"stays in {situation.mode.value}")

    def switched(self, at: float, *, succeeded: bool, seconds: float, after: SplitMode | None = None) -> None:
        """Note a switch that ended, whoever asked for it.

        Args:
            at: when it ended, s.
            succeeded: the session serves in another mode now.
            seconds: its pause.
            after: the mode that it was to go to; None: the one that was decided last.
        """

    def observe_read(self, mode: SplitMode, n: int, depth: int, seconds: float) -> None:
        """Note that a sequence that held `depth` tokens has read `n`; the costs learn from it if they can."""

    def observe_step(self, mode: SplitMode, n_seq: int, depth: float, seconds: float, n_steps: int = 1) -> None:
        """Note that each of so many sequences, which hold `depth` tokens, made `n_steps` tokens, `seconds` each."""
