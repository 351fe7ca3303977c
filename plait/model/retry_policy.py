"""How often a failed message is retried, and how long it waits before each retry: a setting of the group."""

from __future__ import annotations

import math
from typing import Self

import msgspec

from plait.errors import InvalidArgument
from plait.limits import AGE_SECONDS_MAX

#: The longest wait of a policy: two years.
WAIT_SECONDS_MAX = 2 * 366 * 86_400.0
#: The most steps of one policy.
STEPS_MAX = 64
#: The most attempts of a policy: the attempt count of an action-log event has 16 bits.
ATTEMPTS_MAX = 0xFFFF
#: The default number of attempts.
ATTEMPTS = 16
#: If consumers are lost while they hold a message, it becomes a dead letter only after this many deliveries, even if
#: its policy allows fewer attempts: a lost consumer had not started most of the rows that it held.
LOST_ATTEMPTS_MIN = 16
#: A wait is rounded up to a multiple of about 1/GRAIN of its length, so that messages that fail at about the same time
#: share one due time.
GRAIN = 64


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """A retry policy.

    The wait before the second attempt is ``first`` seconds. Each later wait is ``factor`` times as long, but at most
    ``longest``. If ``steps`` is given, it lists the waits instead, and the last one repeats. Each wait is lengthened by
    a random share of up to ``jitter``, so that messages that failed together are not retried together.

    A message becomes a dead letter after ``attempts`` deliveries (None: no limit), or when it fails more than
    ``expires`` seconds after it was stored.
    """

    first: float = 1.0
    factor: float = 2.0
    longest: float = 600.0
    jitter: float = 0.2
    steps: tuple[float, ...] = ()
    attempts: int | None = ATTEMPTS
    expires: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.steps, tuple | list):
            raise InvalidArgument(f"retry: steps are {self.steps!r}; use a tuple of seconds")
        # Make it a tuple, as msgspec decodes it, so that a decoded policy is equal to the original.
        msgspec.structs.force_setattr(self, "steps", tuple(self.steps))
        numbers = {"first": self.first, "factor": self.factor, "longest": self.longest, "jitter": self.jitter}
        for name, value in [*numbers.items(), *(("a step", step) for step in self.steps)]:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= WAIT_SECONDS_MAX:
                raise InvalidArgument(f"retry: {name} is {value!r}; use a number from 0 to {WAIT_SECONDS_MAX:.0f}")
        if self.factor < 1:
            raise InvalidArgument(f"retry: factor is {self.factor}; waits must not become shorter, use 1 or more")
        if self.jitter > 1:
            raise InvalidArgument(f"retry: jitter is {self.jitter}; it is a share of the wait, use 0 to 1")
        if len(self.steps) > STEPS_MAX:
            raise InvalidArgument(f"retry: {len(self.steps)} steps are over the limit of {STEPS_MAX}; use fewer")
        if self.attempts is not None and (type(self.attempts) is not int or not 1 <= self.attempts <= ATTEMPTS_MAX):
            raise InvalidArgument(f"retry: attempts is {self.attempts!r}; use 1 to {ATTEMPTS_MAX}, or None for no end")
        expires = self.expires
        if expires is not None and (
            isinstance(expires, bool) or not isinstance(expires, int | float) or not 0 < expires <= AGE_SECONDS_MAX
        ):
            raise InvalidArgument(
                f"retry: expires is {expires!r}; use seconds, above 0 and up to {AGE_SECONDS_MAX:g}, or None for no end"
            )

    def __str__(self) -> str:
        if self.steps:
            text = ", ".join(f"{step:g}" for step in self.steps) + " s"
        else:
            text = f"{self.first:g} s, then {self.factor:g} times as long each time, at most {self.longest:g} s"
        text += f", up to {self.jitter:.0%} longer" if self.jitter else ""
        text += "" if self.attempts is None else f", {self.attempts} attempts"
        return text + ("" if self.expires is None else f", within {self.expires:g} s")

    @classmethod
    def constant(
        cls, seconds: float, *, jitter: float = 0.0, attempts: int | None = ATTEMPTS, expires: float | None = None
    ) -> Self:
        """The same wait before every retry; 0 retries at once."""
        return cls(steps=(seconds,), jitter=jitter, attempts=attempts, expires=expires)

    @classmethod
    def rocketmq(cls) -> Self:
        """RocketMQ's table: 16 retries, after 10 seconds to 2 hours."""
        minutes = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)
        steps = (10.0, 30.0, *(60.0 * minute for minute in minutes))
        return cls(steps=steps, jitter=0.0, attempts=1 + len(steps))

    def wait(self, attempt: int, chance: float) -> float:
        """Seconds to wait after the ``attempt``-th attempt failed. ``chance`` (0 to 1) scales the jitter."""
        if self.steps:
            base = self.steps[min(attempt, len(self.steps)) - 1]
        else:
            base = self._growing(attempt - 1)
        return min(base * (1 + self.jitter * chance), WAIT_SECONDS_MAX)

    def _growing(self, times: int) -> float:
        """``first`` multiplied by ``factor`` ``times`` times, at most ``longest``."""
        if self.factor == 1 or not 0 < self.first < self.longest:
            return min(self.first, self.longest)
        # Compare logarithms first: the power itself may overflow a float.
        if times >= (math.log(self.longest) - math.log(self.first)) / math.log(self.factor):
            return self.longest
        return float(min(self.first * self.factor**times, self.longest))


def due_time(now: int, seconds: float) -> int:
    """When a wait of ``seconds`` that begins at ``now`` ends, in microseconds, rounded up (see ``GRAIN``)."""
    if seconds <= 0:
        return 0
    micros = round(seconds * 1_000_000)
    grain = 1 << max((micros // GRAIN).bit_length() - 1, 0)
    return -(-(now + micros) // grain) * grain
