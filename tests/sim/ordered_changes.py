"""Changes of the partition count in the simulated cluster, drawn from a seed, and *ways back*.

On a way back partitions become more and soon as few as before, so that the route of a logical partition leads elsewhere
and back. Consumers that are held up meanwhile go by the route of before: what they asked for then still waits at the
partition that the route has come back to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from plait.testing.sim import Fault

#: Partitions of each subject at first.
PARTITIONS = 2
#: Consumers that one way back holds up.
HELD_UP = 3


class Change(NamedTuple):
    """The number of partitions is to become another one."""

    at: float
    subject: str
    partitions: int


def changes_of(draw: random.Random, seconds: float, subjects: Sequence[str]) -> list[Change]:
    """Changes over that long, in order of time; some come at once after another."""
    found = []
    at = draw.uniform(0.0, 4.0)
    while at < seconds:
        found.append(Change(at, draw.choice(subjects), draw.choice([1, 2, 3, 4, 5, 7])))
        at += draw.choice([0.0, 0.1, draw.expovariate(1 / 4.0)])
    return found


def ways_back(
    draw: random.Random,
    seconds: float,
    subject: str,
    consumers: Sequence[str],
    metas: Sequence[str],
    others: Sequence[Change] = (),
) -> tuple[list[Change], list[Fault]]:
    """Ways back of a subject over that long, one after another, and what holds up consumers meanwhile.

    ``others``: the changes that there are besides; a way back leads to as many partitions as there are by these.
    """
    found: list[Change] = []
    faults: list[Fault] = []
    at = draw.uniform(1.0, 3.0)
    # Time for messages in between, and for others after it.
    while (back := at + draw.uniform(0.3, 0.9)) < seconds - 0.5:
        before = [change.partitions for change in others if change.subject == subject and change.at <= at]
        count = before[-1] if before else PARTITIONS
        found += [Change(at, subject, count + draw.choice([1, 2, 3])), Change(back, subject, count)]
        for consumer in draw.sample(consumers, min(HELD_UP, len(consumers))):
            begin = at - draw.uniform(0.0, 0.3)
            # Mostly shorter than a lease: what it gets when it goes on is its own then.
            lasts = min(back + draw.uniform(0.3, 1.5), seconds) - begin
            match draw.choices(("pause", "cut", "kill"), (5, 2, 2))[0]:
                case "pause":
                    faults.append(Fault("pause", begin, lasts, consumer))
                case "cut":
                    # Nobody tells it of the route, and it goes on.
                    faults += [Fault("cut", begin, lasts, consumer, meta) for meta in metas]
                case "kill":
                    # What it had waits for others, who have asked for it.
                    faults.append(Fault("kill", begin, draw.uniform(0.1, lasts), consumer))
        at = back + draw.uniform(0.5, 1.5)
    return found, faults
