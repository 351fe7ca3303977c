"""Random changes of the partition count in the simulated cluster, and *round trips* of a route.

A round trip adds partitions and soon removes them, so that a logical partition moves to another partition and back. A
consumer that is delayed meanwhile still uses the old route, and its old lock requests still wait at the partition to
which the logical partition returned.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from plait.testing.sim import Fault

#: Partitions of each subject at first.
PARTITIONS = 2
#: Consumers that one round trip delays.
HELD_UP = 3


class Change(NamedTuple):
    """A change of the number of partitions."""

    at: float
    subject: str
    partitions: int


def changes_of(draw: random.Random, seconds: float, subjects: Sequence[str]) -> list[Change]:
    """Changes within ``seconds``, in order of time; some follow each other at once."""
    found = []
    at = draw.uniform(0.0, 4.0)
    while at < seconds:
        found.append(Change(at, draw.choice(subjects), draw.choice([1, 2, 3, 4, 5, 7])))
        at += draw.choice([0.0, 0.1, draw.expovariate(1 / 4.0)])
    return found


def round_trips(
    draw: random.Random,
    seconds: float,
    subject: str,
    consumers: Sequence[str],
    metas: Sequence[str],
    others: Sequence[Change] = (),
) -> tuple[list[Change], list[Fault]]:
    """Round trips of a subject within ``seconds``, and the faults that delay consumers meanwhile.

    ``others`` are all other changes. A round trip ends with the number of partitions that they set.
    """
    found: list[Change] = []
    faults: list[Fault] = []
    at = draw.uniform(1.0, 3.0)
    # Leave time for messages between the two changes and after them.
    while (back := at + draw.uniform(0.3, 0.9)) < seconds - 0.5:
        before = [change.partitions for change in others if change.subject == subject and change.at <= at]
        count = before[-1] if before else PARTITIONS
        found += [Change(at, subject, count + draw.choice([1, 2, 3])), Change(back, subject, count)]
        for consumer in draw.sample(consumers, min(HELD_UP, len(consumers))):
            begin = at - draw.uniform(0.0, 0.3)
            # Most delays are shorter than a lease, so the consumer still owns the LPs of the rows it then receives.
            lasts = min(back + draw.uniform(0.3, 1.5), seconds) - begin
            match draw.choices(("pause", "cut", "kill"), (5, 2, 2))[0]:
                case "pause":
                    faults.append(Fault("pause", begin, lasts, consumer))
                case "cut":
                    # It does not learn the new route, but still consumes.
                    faults += [Fault("cut", begin, lasts, consumer, meta) for meta in metas]
                case "kill":
                    # Other consumers, which have requested its locks, take over.
                    faults.append(Fault("kill", begin, draw.uniform(0.1, lasts), consumer))
        at = back + draw.uniform(0.5, 1.5)
    return found, faults
