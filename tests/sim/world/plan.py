"""``Plan`` has the parts of one simulated world and everything that happens in it, as plain data made from a seed.

A plan combines all features at random, so that they interact:

- subjects, strict or best tried, with 1 to 64 partitions, some of which are deleted;
- groups of every kind, delays, transactions, small segments and retention;
- limits of what is sent and delivered in a second;
- changes of routes while groups are stopped;
- faults of machines, networks, disks, clocks and databases. Some plans have no faults.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

from plait.limits import MIB
from plait.testing.sim import Fault, FaultKind, Faults
from tests.sim.meta_servers import LEASE_SECONDS, METAS, Outage
from tests.sim.ordered_changes import Change

Mode = Literal["ordered", "affinity", "shared", "once", "broadcast"]
#: Where a group begins: at the first message, at the last, or at the time of its first start.
Start = Literal["earliest", "latest", "time"]

STRICT, LOOSE, DOOMED = "orders", "prices", "doomed"
#: The subject of recurring messages.
RECURRING = "recurring"
BROKERS = ("g1", "g2", "g3")
PRODUCERS = ("producer-0", "producer-1")
CLIENTS = ("client-0", "client-1", "client-2")
READER = "reader"

#: The groups that messages are addressed to; no member is in the last one.
ADDRESSEES = ("billing", "mail", "once", "absent")

WEIGHTS: dict[FaultKind, float] = {"kill": 3, "crash_at": 2, "pause": 2, "cut": 2, "cut_one_way": 1, "jump": 1}


class SubjectPlan(NamedTuple):
    """A subject and its settings."""

    name: str
    order: Literal["strict", "best_tried"]
    partitions: int
    #: Seconds that messages are kept; None: longer than the run.
    retention: float | None = None


class GroupPlan(NamedTuple):
    """A group, and the clients that have members of it."""

    subject: str
    name: str
    mode: Mode
    start: Start
    clients: tuple[str, ...]
    #: Attempts before a message is a dead letter.
    attempts: int
    #: There are no members between these two times. None: members join and leave at random.
    away: tuple[float, float] | None = None
    #: The filter of the group leaves out messages whose number is a multiple of this; 0: it has no filter.
    without: int = 0
    #: ``Plan.addressed``.
    addressed: int = 0
    #: What identifies a tenant: the key, or a header that all messages have.
    fair_by: str | None = None

    @property
    def filter(self) -> dict[str, str]:
        """The arguments of a consumer for the filter."""
        return {"where": f"number % {self.without} <> 0"} if self.without else {}

    def leaves_out(self, number: int) -> bool:
        if address_of(self.addressed, number) not in (None, self.name):
            return True
        return bool(self.without) and number % self.without == 0

    @property
    def owns(self) -> bool:
        """Whether its members own logical partitions."""
        return self.mode in ("ordered", "affinity")


def address_of(addressed: int, number: int) -> str | None:
    """The only group that gets the message with this number; None: every group."""
    return ADDRESSEES[number // addressed % len(ADDRESSEES)] if addressed and number % addressed == 0 else None


class RecurrencePlan(NamedTuple):
    """A recurrence of the subject ``RECURRING``."""

    #: Its interval in seconds.
    every: float
    key: str | None
    catch_up: Literal["one", "all", "none"]
    #: When it is paused for a moment.
    pauses: tuple[float, ...]
    #: Of the first recurrence: the partitions of the subject at the beginning, and (time, partitions) of their changes.
    partitions: int = 1
    changes: tuple[tuple[float, int], ...] = ()


class RatePlan(NamedTuple):
    """A limit that is set, changed or ended during the run."""

    at: float
    subject: str
    #: None: of what is sent.
    group: str | None
    #: None: the limit ends. The others are so high that a few thousand messages pass in the time of a run.
    messages_per_second: float | None
    bytes_per_second: float | None = None


class RequestPlan(NamedTuple):
    """Requests to a subject, and the changes of its partitions and of those of the replies."""

    #: The partitions of the subject at the beginning.
    partitions: int
    #: (time, subject, partitions).
    changes: tuple[tuple[float, Literal["questions", "replies"], int], ...]


class DiskFault(NamedTuple):
    """A fault of a broker's disk.

    - ``sync``: the next sync fails. The broker ends and restarts on the same page cache; then the power fails.
    - ``full``: the disk is full for a while.
    - ``checkpoint``: the newest checkpoint is damaged, and the broker is killed.
    """

    kind: Literal["sync", "full", "checkpoint"]
    at: float
    seconds: float
    broker: str


class Plan(NamedTuple):
    """One simulated world, as plain data."""

    seed: int
    seconds: float
    flush: Literal["async", "sync"]
    #: The names of the brokers.
    brokers: tuple[str, ...]
    subjects: tuple[SubjectPlan, ...]
    groups: tuple[GroupPlan, ...]
    script: tuple[Fault, ...] = ()
    changes: tuple[Change, ...] = ()
    disk_faults: tuple[DiskFault, ...] = ()
    outages: tuple[Outage, ...] = ()
    #: When the subject ``DOOMED`` is deleted; None: there is no such subject.
    deleted_at: float | None = None
    #: The largest difference between the machines' wall clocks at the beginning, in seconds.
    skew: float = 0.0
    #: How likely a call of a client is cancelled while it runs.
    cancels: float = 0.0
    #: True if some messages are delayed. Delays depend on the clocks of producers and brokers, which then are close.
    delays: bool = False
    #: The probability that a client's member is an app.
    apps: float = 0.3
    #: How likely a handler or a decoder fails.
    failures: float = 0.05
    #: True if a client has the same client id after each start.
    fixed_ids: bool = True
    #: Rows that a consumer pulls ahead.
    prefetch: int = 50
    #: How likely a member consumes its subject by a prefix of the name.
    prefixes: float = 0.0
    #: How likely a producer sends a transaction instead of single messages.
    transactions: float = 0.0
    #: Messages whose number is a multiple of this are addressed to one group; 0: none is.
    addressed: int = 0
    #: True if every fourth message of the subject ``LOOSE`` has a priority.
    priorities: bool = False
    #: True if sending to a subject or consuming it creates the subject, even after its deletion.
    auto_create: bool = True
    #: How much a producer buffers before its sends wait.
    buffer_bytes: int = 64 * MIB
    #: True if retention waits for an archiver, which moves its archive mark now and then.
    archived: bool = False
    #: The broker group that is emptied and switched off in the end; None: all stay.
    emptied: str | None = None
    #: True if the broker group that is switched off is also removed from the routes.
    forgotten: bool = True
    recurrences: tuple[RecurrencePlan, ...] = ()
    #: Whether messages are looked up while faults play.
    queries: bool = False
    rates: tuple[RatePlan, ...] = ()
    #: None: there are no requests.
    requests: RequestPlan | None = None

    @property
    def calm(self) -> bool:
        """Whether machines, networks and disks have no faults."""
        return not (self.script or self.disk_faults or self.outages)

    def subject(self, name: str) -> SubjectPlan:
        return next(subject for subject in self.subjects if subject.name == name)


def draw_plan(seed: int, seconds: float = 6.0) -> Plan:
    draw = random.Random(f"{seed} plan")
    # In a small world more things happen at the same time.
    small = draw.random() < 0.4
    brokers = BROKERS[:1] if small else BROKERS[: draw.choice((1, 2, 3, 3))]
    flush: Literal["async", "sync"] = draw.choice(("async", "sync"))
    subjects = [
        SubjectPlan(STRICT, "strict", _partitions(draw), _retention(draw)),
        SubjectPlan(LOOSE, "best_tried", _partitions(draw), _retention(draw)),
    ]
    if small:
        subjects = [draw.choice(subjects)._replace(partitions=draw.choice((1, 2, 3)))]
    deleted_at = draw.uniform(1.0, seconds) if draw.random() < 0.3 else None
    if deleted_at is not None:
        subjects.append(SubjectPlan(DOOMED, draw.choice(("strict", "best_tried")), draw.choice((1, 2))))
    groups = [group for subject in subjects for group in _groups(draw, subject, seconds)]
    delays = draw.random() < 0.6
    plan = Plan(
        seed,
        seconds,
        flush,
        brokers,
        tuple(subjects),
        tuple(groups),
        changes=tuple(_changes(draw, subjects, groups, seconds)),
        deleted_at=deleted_at,
        skew=draw.choice((0.0, 2.0) if delays else (0.0, 5.0, 3600.0, 90 * 86_400.0)),
        delays=delays,
        cancels=draw.choice((0.0, 0.0, 0.1, 0.3)),
        failures=draw.choice((0.0, 0.05, 0.2)),
        fixed_ids=draw.random() < 0.7,
        prefetch=draw.choice((1, 10, 50, 200)),
        apps=draw.choice((0.0, 0.3, 0.6)),
        auto_create=draw.random() < 0.5,
        buffer_bytes=draw.choice((64 * MIB, 5_000)),
    )
    plan = _with_later_features(plan)
    if draw.random() < 0.3:
        return plan
    return plan._replace(
        script=tuple(_faults(draw, plan)),
        disk_faults=tuple(_disk_faults(draw, plan)),
        outages=tuple(_outages(draw, seconds)),
    )


def _with_later_features(plan: Plan) -> Plan:
    """Draw the newer features separately, so that the rest of a seed's plan does not change."""
    addressed = random.Random(f"{plan.seed} addresses").choice((0, 0, 2, 5))
    groups = tuple(group._replace(addressed=addressed) for group in _filtered(plan))
    queries = random.Random(f"{plan.seed} searches").random() < 0.4
    plan = plan._replace(groups=groups, addressed=addressed, queries=queries)
    return _with_requests(_with_rates(_with_recurrences(_with_ends(_with_priorities(plan)))))


def _with_rates(plan: Plan) -> Plan:
    """Limits of some subjects and groups. Each partition enforces its share, and few keys use few partitions."""
    draw = random.Random(f"{plan.seed} rates")
    if draw.random() < 0.4:
        return plan
    found = []
    for subject in plan.subjects:
        most = max([subject.partitions, *(each.partitions for each in plan.changes if each.subject == subject.name)])
        places = [None, *(group.name for group in plan.groups if group.subject == subject.name)]
        for place in draw.sample(places, draw.choice((1, 1, len(places)))):
            at = draw.choice((0.0, draw.uniform(0.0, plan.seconds)))
            for _ in range(draw.choice((1, 1, 2, 3))):
                messages = draw.choice((None, 20.0 * most, 100.0 * most))
                size = draw.choice((None, None, 50_000.0 * most))
                found.append(RatePlan(at, subject.name, place, messages, size))
                at += draw.expovariate(1.0)
    return plan._replace(rates=tuple(sorted(found, key=lambda each: each.at)))


def _with_requests(plan: Plan) -> Plan:
    draw = random.Random(f"{plan.seed} requests")
    if plan.emptied is not None or draw.random() < 0.6:
        return plan
    subjects: tuple[Literal["questions", "replies"], ...] = ("questions", "replies")
    changes = tuple(
        (draw.uniform(0.2, plan.seconds), draw.choice(subjects), draw.choice((1, 2, 3)))
        for _ in range(draw.choice((0, 1, 3)))
    )
    return plan._replace(requests=RequestPlan(draw.choice((1, 1, 2, 4)), changes))


def _with_recurrences(plan: Plan) -> Plan:
    """Recurring messages, if the wall clocks of meta servers and brokers are close, as for delays."""
    draw = random.Random(f"{plan.seed} recurrences")
    if plan.emptied is not None or plan.skew > 5.0 or draw.random() < 0.5:
        return plan
    found = []
    for _ in range(draw.choice((1, 2, 5))):
        catch_up: Literal["one", "all", "none"] = draw.choice(("one", "all", "none"))
        pauses = tuple(draw.uniform(0.5, plan.seconds) for _ in range(draw.choice((0, 0, 1, 2))))
        found.append(
            RecurrencePlan(draw.choice((1.0, 1.0, 1.3, 2.5)), draw.choice((None, "k1", "k2")), catch_up, pauses)
        )
    changes = tuple(
        (draw.uniform(0.2, plan.seconds), draw.choice((1, 2, 3, 4))) for _ in range(draw.choice((0, 1, 1, 3)))
    )
    found[0] = found[0]._replace(partitions=draw.choice((1, 2, 4)), changes=changes)
    return plan._replace(recurrences=tuple(found))


def _with_ends(plan: Plan) -> Plan:
    plan = plan._replace(prefixes=random.Random(f"{plan.seed} prefixes").choice((0.0, 0.0, 0.5)))
    plan = plan._replace(transactions=random.Random(f"{plan.seed} transactions").choice((0.0, 0.1, 0.4)))
    draw = random.Random(f"{plan.seed} later")
    # A deleted subject that is sent to again may be created on any broker.
    may_be_emptied = len(plan.brokers) > 1 and plan.deleted_at is None
    plan = plan._replace(
        archived=any(subject.retention for subject in plan.subjects) and draw.random() < 0.5,
        emptied=draw.choice(plan.brokers) if may_be_emptied and draw.random() < 0.5 else None,
    )
    if plan.emptied is None or draw.random() < 0.5:
        return plan
    # Listing dead letters and parked keys asks all brokers of the routes.
    groups = tuple(group._replace(attempts=10_000) for group in plan.groups)
    return plan._replace(groups=groups, forgotten=False)


def _filtered(plan: Plan) -> tuple[GroupPlan, ...]:
    draw = random.Random(f"{plan.seed} filters of groups")
    if draw.random() < 0.6:
        return plan.groups
    return tuple(group._replace(without=draw.choice((0, 2, 3, 7))) for group in plan.groups)


def _with_priorities(plan: Plan) -> Plan:
    draw = random.Random(f"{plan.seed} priorities")
    fair = ("number", "key", None)
    groups = tuple(
        group._replace(fair_by=draw.choice(fair)) if group.mode in ("shared", "once") else group
        for group in plan.groups
    )
    return plan._replace(groups=groups, priorities=draw.random() < 0.5)


def _partitions(draw: random.Random) -> int:
    return draw.choices((1, 2, 3, 5, 16, 64), (4, 4, 3, 2, 1, 0.5))[0]


def _retention(draw: random.Random) -> float | None:
    return draw.choices((None, 2.0), (3, 1))[0]


def _groups(draw: random.Random, subject: SubjectPlan, seconds: float) -> list[GroupPlan]:
    """One group whose members own logical partitions, and a few others."""
    kinds: list[tuple[str, Mode]] = [("billing", "ordered" if draw.random() < 0.8 else "affinity")]
    others: list[tuple[str, Mode]] = [("mail", "shared"), ("once", "once"), ("screens", "broadcast")]
    kinds += draw.sample(others, draw.choice((1, 1, 2)))
    found = []
    for name, mode in kinds:
        start: Start = "latest" if mode == "broadcast" else draw.choice(("earliest", "earliest", "latest", "time"))
        clients = CLIENTS[: draw.choice((1, 2) if mode in ("once", "broadcast") else (1, 2, 3, 3))]
        away = None
        if draw.random() < 0.25:
            begin = draw.uniform(1.0, seconds / 2)
            away = begin, begin + draw.uniform(1.0, seconds / 2)
        found.append(GroupPlan(subject.name, name, mode, start, clients, draw.choice((2, 5, 10_000)), away))
    return found


def _changes(
    draw: random.Random, subjects: Sequence[SubjectPlan], groups: Sequence[GroupPlan], seconds: float
) -> list[Change]:
    """Changes of the partition count; some while all members of a group are away."""
    found = []
    at = draw.uniform(0.0, 4.0)
    while at < seconds:
        found.append(Change(at, draw.choice(subjects).name, _partitions(draw)))
        at += draw.choice((0.1, draw.expovariate(1 / 3.0)))
    for group in groups:
        if group.away is not None and draw.random() < 0.7:
            at = draw.uniform(*group.away)
            found.append(Change(at, group.subject, draw.choice((2, 3, 4, 7))))
    return sorted(found)


def _faults(draw: random.Random, plan: Plan) -> list[Fault]:
    others = (*PRODUCERS, *CLIENTS, READER)
    pairs = [(broker, other) for broker in plan.brokers for other in (*METAS, *others)]
    pairs += [(meta, other) for meta in METAS for other in others]
    weights = WEIGHTS if plan.flush == "async" else WEIGHTS | {"power_loss": 1}
    return Faults(
        draw,
        # Servers are hit as often as all other processes together.
        [*2 * plan.brokers, *METAS, *others],
        pairs,
        disks=plan.brokers,
        weights=weights,
        every_seconds=draw.choice((0.7, 1.5, 3.0, 6.0)),
        long_seconds=2.5 * LEASE_SECONDS,
        # Retries and delays use the broker's wall clock. Setting it back by more would delay them for too long.
        jump_seconds=20.0,
    ).script(plan.seconds)


def _disk_faults(draw: random.Random, plan: Plan) -> list[DiskFault]:
    found = []
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        kinds: tuple[Literal["sync", "full", "checkpoint"], ...] = ("sync", "full", "checkpoint")
        at = draw.uniform(0.5, plan.seconds - 0.5)
        lasts = min(draw.uniform(0.1, 2.0), plan.seconds - at)
        found.append(DiskFault(draw.choice(kinds), at, lasts, draw.choice(plan.brokers)))
    return found


def _outages(draw: random.Random, seconds: float) -> list[Outage]:
    if draw.random() < 0.7:
        return []
    at = draw.uniform(0.5, seconds)
    return [Outage(at, min(draw.choice((0.5, 2.0, 5.0)), seconds - at))]
