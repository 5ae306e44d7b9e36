"""The sync interval in force: the recipe's H, or longer for a slower aggregator (design, 4.1).

Versions of one aggregator are merged one after the other, and so they are made durable. If a stage takes longer for one
than rounds are apart, those that close wait before it, each longer than the last: what they merge is stale when its
turn comes. So rounds open as far apart as the slower stage takes, and no round waits behind many. Pure.
"""

from __future__ import annotations

import math

from aggregator.rules.averages import MovingAverage

#: The interval is so much longer than the slower stage needs.
HEADROOM = 1.25
#: It becomes longer once more than that part of it is needed, or what piled up would stay for good. It becomes shorter
#: once less than that part would do, headroom included.
LENGTHEN, SHORTEN = 0.9, 0.7
#: It is at most so many times that of the recipe.
MOST = 64
#: Samples of a stage before it is believed.
LEARNED = 8
#: Weight of one sample: a disk that others use takes now a tenth of the average, now its tenfold.
RATE = 0.1
#: After a change the rounds of so many intervals go by before it becomes longer again, and before it becomes shorter.
REST_LONGER, REST_SHORTER = 1, 4


class SerialStage:
    """Measures the time of one piece of work in a serial stage, without the wait for its turn."""

    def __init__(self) -> None:
        self._average = MovingAverage(RATE)
        self._samples = 0
        self._done_at_s: float | None = None  # the piece before

    def done(self, given_s: float, now_s: float) -> None:
        """Takes a sample: work given at ``given_s`` is done. The first, when kernels load, is left out."""
        if self._done_at_s is not None:
            self._average.add(max(0.0, now_s - max(given_s, self._done_at_s)))
            self._samples += 1
        self._done_at_s = now_s

    @property
    def service_s(self) -> float:
        """Moving average of one piece's time; 0 before enough is known."""
        return self._average.get() if self._samples >= LEARNED else 0.0


def next_interval(recipe_steps: int, present_steps: int, needed_steps: float) -> int:
    """Returns the next interval in inner steps: the present one unless clearly too short or too long.

    Args:
        recipe_steps: The interval is never below.
        present_steps: In force.
        needed_steps: That the slowest stage takes for all rounds of an interval.
    """
    wanted_steps = HEADROOM * needed_steps
    if needed_steps > LENGTHEN * present_steps or wanted_steps < SHORTEN * present_steps:
        return math.ceil(min(max(recipe_steps, wanted_steps), MOST * recipe_steps))
    return present_steps


class Interval:
    """The sync interval of one aggregator, which follows the slower of its stages.

    Args:
        recipe_steps: H of the recipe.
        rounds: That it merges in one interval: its moving fragments.

    Attributes:
        recipe_steps: As given.
        steps: In force.
        merging: From the end of a round to the new parameters.
        writing: From there until they are durable, on this aggregator's disk.
        because: Why it differs from the recipe; empty where it does not.
    """

    def __init__(self, recipe_steps: int, rounds: int = 0) -> None:
        self.recipe_steps = self.steps = recipe_steps
        self._rounds = rounds
        self.merging, self.writing = SerialStage(), SerialStage()
        self.because = ""
        self._since = 0  # rounds, the last change

    def follow(self, step_s: float) -> str:
        """Adapts the interval to the stages at a median inner step of ``step_s``; says why if it changes.

        Asked once for each round.
        """
        self._since += 1
        if not step_s:
            return ""
        merging_s, writing_s = self.merging.service_s, self.writing.service_s
        service_s, what = max((merging_s, "merging"), (writing_s, "writing"))
        needed_steps = self._rounds * service_s / step_s
        steps = next_interval(self.recipe_steps, self.steps, needed_steps)
        rest = self._rounds * (REST_LONGER if steps > self.steps else REST_SHORTER)
        if steps == self.steps or self._since <= rest:
            return ""
        self.steps, self._since = steps, 0
        why = f"{what} takes {service_s:.2g} s a round, and {self._rounds} rounds {needed_steps:.0f} inner steps"
        self.because = why if steps > self.recipe_steps else ""
        return why
