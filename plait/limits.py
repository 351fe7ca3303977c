"""Every bound Plait enforces: its name, its default and the reason.

Sizes are bytes, times are seconds. A limit a user may change is a field of ``ServerLimits`` or
``ClientLimits``; the rest are properties of the formats and constants.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# --- format -------------------------------------------------------------------------------------
#: A frame, header included. Large enough for one 16 MiB body with its columns.
FRAME_SIZE_MAX: Final = 17 * MIB
#: Rows of one frame: keeps a row selection and its masks small.
FRAME_COUNT_MAX: Final = 1 << 20
#: One column after inflation; a compressed column declaring more is refused unread.
COLUMN_SIZE_MAX: Final = 64 * MIB
#: A message body.
BODY_SIZE_MAX: Final = 16 * MIB
#: An order key in UTF-8.
KEY_SIZE_MAX: Final = 1024
#: All headers of one message, encoded.
HEADERS_SIZE_MAX: Final = 64 * KIB
#: Tags of one message.
TAGS_MAX: Final = 16
#: Slots that order keys hash to (DESIGN: logical partitions).
LOGICAL_PARTITIONS: Final = 1024

# --- numbers from outside ------------------------------------------------------------------------
#: A number that a client may send where no narrower limit holds: one that fits a signed 64-bit column.
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
#: Route versions and epochs of locks, which come from one counter of the meta servers, end here.
NUMBER_MAX: Final = 1 << 62
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
#: A route version or an epoch is believed when it is at most so much above the highest number that is known: more than
#: meta servers count in years, and so little that made-up numbers cannot use the counter up.
NUMBER_STEP_MAX: Final = 1 << 32
#: The age at which messages expire or are tried no more, in seconds: what fits a signed 64-bit number of microseconds.
AGE_SECONDS_MAX: Final = 1e12
#: The most bytes that a subject can be asked to keep.
RETENTION_BYTES_MAX: Final = (1 << 63) - 1
#: The number of a broker's life: 32 bits of a frame's stamp.
BrokerEpoch = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]

# --- delays -------------------------------------------------------------------------------------
#: What can be asked for as a delay. Less than this is within what delivery takes anyway...
DELAY_SECONDS_MIN: Final = 0.01
#: ...and more than two years is rather a mistake of units: 2 * 366 days.
DELAY_SECONDS_MAX: Final = 2 * 366 * 86_400.0
#: Scheduled messages that one listing answers with.
SCHEDULE_PAGE_MAX: Final = 1_000

# --- derived state ------------------------------------------------------------------------------
#: Pairs of a producer and a partition remembered for idempotence; the longest silent producer goes first. One takes
#: 2.4 kB when full: 1.2 GB at most. More than the subjects, so that one producer alone does not use them up.
PRODUCER_WINDOWS_MAX: Final = 500_000

#: A producer that has sent over at least this time is proven. Of too many, those that are not are forgotten first:
#: a client that opens thousands of new ones makes brokers forget those, and not the ones that other clients use.
PRODUCER_PROVEN_SECONDS: Final = 60.0

# --- dead letters --------------------------------------------------------------------------------
#: Dead letters that one request lists: each is looked at by itself.
DEAD_LIST_MAX: Final = 1_000
#: Ranges that a consumer at most once may give back: what it pulled ahead last, and far more than it keeps in memory.
HANDED_RANGES_MAX: Final = 1_000
#: Dead letters that one request counts, resends or purges: a few milliseconds of the server's time.
DEAD_PAGE_MAX: Final = 2_000

#: Sequences of dead letters that one request names.
DEAD_SEQUENCES_MAX: Final = 5_000
#: Parked keys that one request lists, resumes or skips: their letters are looked at one by one.
PARKED_PAGE_MAX: Final = 500

# --- batches ------------------------------------------------------------------------------------
#: Stages of one batch that is committed: its decision is one request, and names them all.
COMMIT_STAGES_MAX: Final = 2_500
#: Stages that one request to a broker names.
STAGES_PAGE_MAX: Final = 1_000

# --- leases -------------------------------------------------------------------------------------
#: A consumer's lease: heartbeats come every second, and two of them have to fit...
LEASE_SECONDS_MIN: Final = 2.0
#: ...and what a dead consumer had stands still for as long as this.
LEASE_SECONDS_MAX: Final = 3600.0

# --- open files ---------------------------------------------------------------------------------
#: Files a server keeps free of connections and maps: those of its loop and of health checks, checkpoints, segments
#: that are to come, and connections that are about to be refused.
FILES_RESERVE: Final = 256
#: Files a segment of a log has open: itself, and its map.
FILES_PER_SEGMENT: Final = 2

# --- background tasks ---------------------------------------------------------------------------
#: A background task that failed is started again after this: soon enough that users hardly notice, and seldom enough
#: that one that fails at once fills neither a core nor the log.
TASK_RESTART_SECONDS: Final = 1.0

# --- consuming ----------------------------------------------------------------------------------
#: Rows that each partition of a consumer may pull ahead at least, whatever the number of partitions: a pull and an ack
#: of fewer cost more than handling them. On more than 62 partitions the default prefetch_count is exceeded by it...
PREFETCH_SHARE_MIN: Final = 16
#: ...where prefetch_count is so many times larger. A small one is a wish that is kept: one row each then.
PREFETCH_SHARES_MAX: Final = 60

#: Ranges that one request acks, gives back or claims at an attach. A range costs 10 to 25 µs of the broker's loop, and
#: at an attach to an ordered group up to 100 µs: a request takes up to 25 ms, or 100 ms. Clients split what is more.
REQUEST_RANGES_MAX: Final = 1_000
#: Ranges that one request reports as failed: each may hold its key, or become dead letters, at up to 650 µs.
FAILED_RANGES_MAX: Final = 64

# --- names --------------------------------------------------------------------------------------
#: Subject, group, client and partition names: short enough for file and metric names.
NAME_LENGTH_MAX: Final = 200
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_%][A-Za-z0-9_.%:-]*")
NAME_RULE: Final = f"1 to {NAME_LENGTH_MAX} letters, digits and _ . % : -, not starting with . : or -"
#: Names that begin with this are given by Plait itself.
RESERVED: Final = "%"
#: Partitions of one subject are told apart by what stands behind a #.
PARTITION_PATTERN: Final = re.compile(r"[A-Za-z0-9_%][A-Za-z0-9_.%:#-]*")
PARTITION_LENGTH_MAX: Final = NAME_LENGTH_MAX + 20
TAG_LENGTH_MAX: Final = 127
#: Groups that are remembered of the partitions that have left a subject's route, 100 bytes each: the route is read with
#: all of them. Broadcasts go first, then those of the partitions that left first; a group that is not remembered counts
#: as new.
REMEMBERED_GROUPS_MAX: Final = 1_000


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server lets its clients use, so that its memory stays bounded whatever they do."""

    #: Connections; each costs about 20 KiB.
    connections: int = 10_000
    #: A connection must say hello within this, or it is closed.
    hello_seconds: float = 10.0
    #: Half-open peers: nothing heard for this long closes the connection.
    idle_seconds: float = 30.0
    #: Bytes received and not yet stored, per connection; reading pauses above it.
    in_flight_bytes_per_connection: int = 32 * MIB
    #: Bytes queued towards one slow reader; its requests wait above it.
    outgoing_bytes_per_connection: int = 8 * MIB
    #: Bytes queued towards all readers; above it the connection with the most is closed.
    outgoing_bytes_total: int = 512 * MIB
    #: Long polls that one connection has waiting.
    polls_per_connection: int = 10_000
    #: Bytes of half-received packets over all connections; above it the one that has gone on longest is given up.
    partial_bytes_total: int = 512 * MIB
    #: Subjects (each costs memory and a consume log file).
    subjects: int = 100_000
    #: Groups over all subjects. One takes 3 KiB, an ordered one 4 KiB and with a run of locks 15 KiB.
    #: Locks are kept as runs, so only one whose logical partitions are each another consumer's takes more (2 MiB).
    groups: int = 300_000
    #: Consumers attached at once, and those that lost their connection and are not lost yet.
    consumers: int = 100_000
    #: Separate unacked ranges of one consumer; it gets nothing new above it.
    consumer_ranges: int = 10_000
    #: Separate ranges of one group that failed and wait for their next attempt; it gets nothing new above it.
    retry_ranges: int = 500_000
    #: Messages of one group that are dead letters, or retries that outlived their subject's retention (about 200 bytes
    #: each); it gets nothing new above it.
    kept_messages: int = 500_000
    #: Keys of one ordered group that failed and hold their place, or are parked; it gets nothing new above it.
    held_keys: int = 10_000
    #: An ordered consumer has its locks for this long after it asked for them last...
    lease_seconds: float = 10.0
    #: ...and the broker counts longer by this part of it. The consumer counts from an earlier moment, so this is only
    #: for clocks that go at different speeds, where a hundredth of it is much.
    lease_margin: float = 0.05
    #: Cancelled and rescheduled messages that are remembered until they would be due; more are refused.
    schedule_settled: int = 1_000_000
    #: What tasks of Spark's sink have written and not yet committed: a stage for each, which costs 2 KiB. A task that
    #: is done has one for each partition that its rows are for.
    stages: int = 100_000
    #: A stage that nobody publishes holds its part of the message log for so long after its last row (7 days: a
    #: query that failed on a Friday goes on when somebody is back)...
    stage_seconds: float = 7 * 86400.0
    #: ...and so many expired ones are remembered, the newest, 2 KiB each. A stage that is not known counts as
    #: published, so an expired one must not be forgotten while a driver may ask for it: no clock tells when that is.
    stages_expired: int = 20_000
    #: Producers remembered for idempotence; the longest silent goes first.
    producers: int = 100_000
    #: Silent producers are forgotten after this (7 days).
    producer_seconds: float = 7 * 86400.0
    #: Frames per producer and partition whose receipts can be given again.
    producer_window_frames: int = 64
    #: Messages one pull may ask for.
    pull_count: int = 1_000_000
    #: Bytes one pull may return; one whole frame is always returned.
    pull_bytes: int = 16 * MIB
    #: A long poll may wait this long.
    pull_wait_seconds: float = 60.0
    #: A consumer not heard from for this is lost: its unacked messages go to the others.
    consumer_lost_seconds: float = 5.0
    #: Idle broadcast groups are forgotten after 2 days: a client that was away for a weekend continues.
    group_forget_seconds: float = 2 * 86400.0
    #: Sends are refused while the oldest waiting one is older than this.
    queue_head_seconds: float = 0.2
    #: Sends are refused while one log write or sync has taken longer than this.
    log_busy_seconds: float = 1.0
    #: Rows whose keys a broker remembers for its ordered groups, 10 bytes each: as many frames as its owners are busy
    #: with. The longest unused goes first.
    key_rows: int = 1 << 22
    #: Open consume-log maps kept; the least recently read is closed.
    open_maps: int = 1_000


class MetaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a meta server keeps, and how long it waits before it takes somebody for lost."""

    #: Subjects and groups in all: a meta server has all of them in memory (about 1 KiB each).
    subjects: int = 100_000
    groups: int = 300_000
    #: Members of one group, and groups that one client is a member of: an allocation and a heartbeat name them all.
    members_per_group: int = 10_000
    groups_per_client: int = 10_000
    #: A broker that was silent for so long is lost: subjects that are made meanwhile go to others.
    broker_lost_seconds: float = 5.0
    #: A client that was silent for so long is lost: its logical partitions go to others. As long as a consumer's lease:
    #: sooner would be of no use, as its locks last that long.
    member_lost_seconds: float = 10.0
    #: A process that was silent for so long no longer speaks for its client id: another one may. Heartbeats come every
    #: second, and every three seconds from a client whose loop is busy.
    speaker_seconds: float = 5.0
    #: How often the heartbeats of clients are noted for other meta servers.
    beat_flush_seconds: float = 2.0
    #: A pause of the meta server itself, or of its database, counts as so much silence of the others: well within
    #: a lease.
    gap_seconds: float = 2.0
    #: A change that others forestalled is tried again so often.
    attempts: int = 8
    #: Allocations are computed in slices of about this length, so that heartbeats pass...
    slice_seconds: float = 0.001
    #: ...and those of so many groups are written at once, beside them.
    write_groups: int = 64
    #: Members that leave or are lost are written at once until they are so many: more would hold up heartbeats when
    #: that is known.
    write_members: int = 100
    #: Clients that are looked at, noted or given up in one go.
    page: int = 500
    #: That a batch of Spark's sink is committed is remembered for so long after the last word of its query (30 days of
    #: the cluster's age, which no wall clock advances)...
    commit_seconds: float = 30 * 86400.0
    #: ...and one that is not done after so long is finished by whoever commits next.
    commit_late_seconds: float = 60.0
    #: What was deleted is removed from the database after at least so long.
    clean_seconds: float = 600.0

    @classmethod
    def of_lease(cls, seconds: float) -> MetaLimits:
        """For consumers whose lease is so long: other meta servers hear of heartbeats well within it."""
        usual = cls()
        return cls(
            member_lost_seconds=seconds,
            speaker_seconds=min(usual.speaker_seconds, seconds),
            beat_flush_seconds=min(usual.beat_flush_seconds, seconds / 4),
            gap_seconds=min(usual.gap_seconds, seconds / 3),
        )


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a client buffers and how long it waits."""

    #: A frame leaves when its bodies reach this...
    frame_bytes: int = 256 * KIB
    #: ...or its rows reach this...
    frame_count: int = 10_000
    #: Frames of ``send_many`` are larger: there is less to do for each byte.
    many_frame_bytes: int = 1 * MIB
    many_frame_count: int = 50_000
    #: ...or the oldest posted row has waited this long (an awaited send never waits for it).
    linger_seconds: float = 0.005
    #: Rows buffered and unacknowledged, over all subjects: above it ``post`` raises and ``send`` waits.
    buffer_bytes: int = 64 * MIB
    #: Frames under way per partition (at most the server's producer_window_frames).
    in_flight_frames: int = 16
    #: A send that has no answer after this raises ``Timeout``.
    send_seconds: float = 30.0
    #: First and longest pause before what a broker refused is sent again, and before a route is asked for again.
    send_retry_first_seconds: float = 0.05
    send_retry_max_seconds: float = 1.0
    #: Partitions that a refused send is tried on, where it may go elsewhere.
    send_attempts: int = 3
    #: A broker that was not reached for this long has its rows sent elsewhere, where they may go elsewhere.
    unreached_seconds: float = 2.0
    #: Routes are looked at again this often, though nobody found that they lead nowhere.
    route_seconds: float = 30.0
    #: What a client keeps for each subject that it sends to is dropped after so long without a send, and found again
    #: by the next one: names of subjects may be without end.
    sender_idle_seconds: float = 600.0
    #: Connecting, the handshake and admin requests.
    request_seconds: float = 10.0
    #: Opening a client fails after this where every address refuses the connection: no server listens there. One that
    #: is being started, or started again, has this long to begin to.
    refused_seconds: float = 2.0
    #: First and longest pause between attempts to reconnect.
    reconnect_first_seconds: float = 0.05
    reconnect_max_seconds: float = 2.0
    #: A connection that lived this long was a good one: the next pause is the first again.
    reconnect_steady_seconds: float = 1.0
    #: Heartbeats per connection.
    heartbeat_seconds: float = 1.0
    #: Consumer flow control: unacked messages, their bytes, and the span of their sequences.
    prefetch_count: int = 1_000
    prefetch_bytes: int = 100 * MIB
    prefetch_span: int = 2_000
    #: One pull's share of it.
    pull_bytes: int = 1 * MIB
    #: How long one long poll waits at the server before it is asked again.
    pull_wait_seconds: float = 20.0
    #: Opening a consumer waits so long for the rest of its partitions once it has one of them; they follow later.
    attach_seconds: float = 1.0
    #: An ordered consumer whose user has had a message for this long gives its locks up.
    handling_seconds: float = 900.0
    #: ``App``: how long handlers may go on after SIGTERM before they are cancelled and their messages given back.
    drain_seconds: float = 30.0
    #: ``App``: how long an ``async def`` handler that was cancelled then may take to end. Long enough to close a file
    #: or a connection; one that ignores its cancellation must not keep the process.
    cancel_seconds: float = 2.0
