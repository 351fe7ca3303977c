"""Every bound that Plait enforces: its name, its default and the reason.

Sizes are bytes, times are seconds. A limit that a user may change is a field of ``ServerLimits`` or ``ClientLimits``;
the others are constants of the formats and of the implementation.
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
#: The largest packet: a frame and its request. Pull replies stay below this size too.
PACKET_SIZE_MAX: Final = FRAME_SIZE_MAX + 1 * MIB
#: Rows of one frame: bounds the size of row masks.
FRAME_COUNT_MAX: Final = 1 << 20
#: One column after decompression; a column that declares more is refused before it is decompressed.
COLUMN_SIZE_MAX: Final = 64 * MIB
#: The highest priority of a message; the lowest is 0.
PRIORITY_MAX: Final = 9
#: A message body, and an order key in UTF-8.
BODY_SIZE_MAX: Final = 16 * MIB
KEY_SIZE_MAX: Final = 1024
#: All headers of one message, encoded.
HEADERS_SIZE_MAX: Final = 64 * KIB
#: Header names with a column of their own in a frame; rows keep further names in msgpack maps.
HEADER_COLUMNS_MAX: Final = 64
#: A filter's condition: its characters, its parts, and how deep they are nested.
FILTER_LENGTH_MAX: Final = 4096
FILTER_NODES_MAX: Final = 512
FILTER_DEPTH_MAX: Final = 32
#: Wildcards in those LIKE patterns of a condition that have a % between other characters. Each may double the states in
#: which a regular expression can be: with this many, 64 KiB of text take up to 10 ms.
FILTER_WILDCARDS_MAX: Final = 12
#: What a filter examines of a frame before it looks at the time: messages, bytes, and conditions times both.
FILTER_PART_COUNT: Final = 1 << 16
FILTER_PART_BYTES: Final = 1 * MIB
FILTER_PART_WORK: Final = 1 << 21
#: What all filters of a broker examine in one turn of its loop, so that they do not delay other requests: seconds; and
#: messages, frames and bytes of frames, whatever the clock says. A commit and the other requests come in between.
FILTER_SCAN_SECONDS: Final = 0.02
FILTER_SCAN_COUNT: Final = 100_000
FILTER_SCAN_FRAMES: Final = 1_000
FILTER_SCAN_BYTES: Final = 16 * MIB
#: Subjects of one consumer, listed or matching a prefix: each has connections, pulls and memory of its own.
SUBSCRIBED_SUBJECTS_MAX: Final = 1_000
#: What a whole query examines at most unless its caller says otherwise: messages, bytes of frames, and seconds.
QUERY_SCAN_COUNT: Final = 10_000_000
QUERY_SCAN_BYTES: Final = 4 * GIB
QUERY_SCAN_SECONDS: Final = 30.0
#: The most messages of one query.
QUERY_COUNT_MAX: Final = 100_000
#: Tags of one message.
TAGS_MAX: Final = 16
#: Slots that order keys hash to (DESIGN: logical partitions).
LOGICAL_PARTITIONS: Final = 1024

# --- numbers from outside ------------------------------------------------------------------------
#: A number from a client where no narrower limit applies: it must fit a signed 64-bit column.
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
#: The highest route version and lock epoch; both come from one counter of the meta servers.
NUMBER_MAX: Final = 1 << 62
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
#: A route version or an epoch is accepted if it exceeds the highest known number by at most this. Meta servers do not
#: count that far in years, and forged numbers cannot exhaust the counter in steps of this size.
NUMBER_STEP_MAX: Final = 1 << 32
#: The longest age for retention and retries, in seconds: it fits a signed 64-bit number of microseconds.
AGE_SECONDS_MAX: Final = 1e12
#: The largest ``retention_bytes`` of a subject.
RETENTION_BYTES_MAX: Final = (1 << 63) - 1
#: The lowest limits of messages and bytes a second: below them one message, or one frame, takes minutes or hours.
RATE_MESSAGES_MIN: Final = 0.01
RATE_BYTES_MIN: Final = 1 * KIB
RATE_MAX: Final = 1e12
#: A limit keeps what is not used in this time. After it was used up, rows come in batches of at least the second time.
RATE_BURST_SECONDS: Final = 1.0
RATE_STEP_SECONDS: Final = 0.05
#: The data epoch of a broker: 32 bits of a frame's stamp.
BrokerEpoch = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]

# --- delays -------------------------------------------------------------------------------------
#: The shortest delay: delivery itself takes about as long.
DELAY_SECONDS_MIN: Final = 0.01
#: The longest delay, two years: more is probably a mistake of units.
DELAY_SECONDS_MAX: Final = 2 * 366 * 86_400.0
#: Scheduled messages in the reply to one listing.
SCHEDULE_PAGE_MAX: Final = 1_000
#: A recurrence: the characters of its cron expression, or its interval, as firings go through a database.
CRON_LENGTH_MAX: Final = 200
RECURRENCE_SECONDS_MIN: Final = 1.0
RECURRENCE_SECONDS_MAX: Final = 366 * 86_400.0
#: The body and the encoded headers of a recurrence: its definition is in the meta database, and in one packet head.
RECURRENCE_BODY_MAX: Final = 16 * KIB
RECURRENCE_HEADERS_MAX: Final = 4 * KIB
#: With ``catch_up="all"``, this many missed firings in a row are made up for; the rest is skipped.
CATCH_UP_MAX: Final = 1_000
#: With ``catch_up="none"``, a firing that is later than this is skipped.
FIRING_LATE_SECONDS: Final = 10.0
#: Recurrences in the reply to one listing; times in the reply to one preview.
RECURRENCE_PAGE_MAX: Final = 200

# --- derived state ------------------------------------------------------------------------------
#: Pairs of a producer and a partition that are remembered for idempotence; the one silent the longest is forgotten
#: first. A full one takes 2.4 kB: 1.2 GB at most. More than the subjects, so that one producer cannot exhaust it.
PRODUCER_WINDOWS_MAX: Final = 500_000
#: A producer is proven once it has been sending for this long. Brokers forget unproven producers first: a client that
#: opens thousands of producers displaces its own, not those of other clients.
PRODUCER_PROVEN_SECONDS: Final = 60.0
#: Of this many rows that a group is given, one has a lower priority while such rows wait, so that none starves.
PRIORITY_SHARE: Final = 16
#: Runs of rows of one priority and tenant that a group knows ahead of its position, 120 bytes each; rows behind wait.
LOOK_AHEAD_RUNS_MAX: Final = 65_536
#: What a consumer prefetches once rows may overtake others: 64 rows of a millisecond each take less than 100 ms.
RANKED_PREFETCH_COUNT: Final = 64

# --- dead letters --------------------------------------------------------------------------------
#: Dead letters that one request lists: the broker reads each of them.
DEAD_LIST_MAX: Final = 1_000
#: Ranges that an at-most-once consumer can return: the last ones delivered to it, far more than it buffers.
HANDED_RANGES_MAX: Final = 1_000
#: Dead letters that one request counts, resends or purges: a few milliseconds of the server's time.
DEAD_PAGE_MAX: Final = 2_000
#: Sequences of dead letters in one request.
DEAD_SEQUENCES_MAX: Final = 5_000
#: Parked keys that one request lists, resumes or skips: the broker reads the dead letter of each.
PARKED_PAGE_MAX: Final = 500

# --- batches ------------------------------------------------------------------------------------
#: Stages of one batch (the request that commits the batch names all of them), and in one request to a broker.
COMMIT_STAGES_MAX: Final = 2_500
STAGES_PAGE_MAX: Final = 1_000

# --- transactions -------------------------------------------------------------------------------
#: Transactions in one reply to a producer that waits for checks, and bytes of their half messages.
CHECKS_PAGE_MAX: Final = 100
CHECKS_SIZE_MAX: Final = 1 * MIB
#: Transactions that one request lists, and half messages that one request shows.
TRANSACTIONS_PAGE_MAX: Final = 1_000
HALF_MESSAGES_SHOWN_MAX: Final = 100

# --- leases -------------------------------------------------------------------------------------
#: The shortest lease of a consumer, so that two heartbeats fit, and the longest: rows of a dead consumer wait for it.
LEASE_SECONDS_MIN: Final = 2.0
LEASE_SECONDS_MAX: Final = 3600.0

# --- open files ---------------------------------------------------------------------------------
#: File descriptors that a server reserves beside those for connections and maps: for checkpoints, new segments, checks.
FILES_RESERVE: Final = 256
#: File descriptors of one log segment: the file and its map.
FILES_PER_SEGMENT: Final = 2

# --- background tasks ---------------------------------------------------------------------------
#: The pause before a failed background task restarts, so that one that always fails fills neither a core nor the log.
TASK_RESTART_SECONDS: Final = 1.0

# --- consuming ----------------------------------------------------------------------------------
#: The least number of rows that a consumer prefetches from each partition, whatever the number of partitions: pulling
#: and acking fewer rows costs more than handling them. Over 62 partitions exceed the default ``prefetch_count``.
PREFETCH_SHARE_MIN: Final = 16
#: ``PREFETCH_SHARE_MIN`` applies in full if ``prefetch_count`` is at least this many times as large. With a smaller
#: ``prefetch_count``, which is deliberate, the minimum shrinks in proportion, down to one row.
PREFETCH_SHARES_MAX: Final = 60
#: Ranges that one request acks, returns, or claims at an attach. A range takes 10 to 25 µs of the broker's loop, and up
#: to 100 µs at an attach to an ordered group: a request takes up to 25 ms, or 100 ms. Clients split larger requests.
REQUEST_RANGES_MAX: Final = 1_000
#: Ranges that one request nacks: each may hold its key or become dead letters, which takes up to 650 µs.
FAILED_RANGES_MAX: Final = 64

# --- names --------------------------------------------------------------------------------------
#: Subject, group, client and partition names: short enough for file and metric names.
NAME_LENGTH_MAX: Final = 200
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_%][A-Za-z0-9_.%:-]*")
NAME_RULE: Final = f"1 to {NAME_LENGTH_MAX} letters, digits and _ . % : -, not starting with . : or -"
#: Names that begin with this are reserved for Plait.
RESERVED: Final = "%"
#: The partitions of one subject differ in the suffix after #.
PARTITION_PATTERN: Final = re.compile(r"[A-Za-z0-9_%][A-Za-z0-9_.%:#-]*")
PARTITION_LENGTH_MAX: Final = NAME_LENGTH_MAX + 20
TAG_LENGTH_MAX: Final = 127
#: Paused groups, and limited groups, of one subject: part of its settings, which every order to a broker contains.
PAUSED_GROUPS_MAX: Final = 1_000
LIMITED_GROUPS_MAX: Final = 1_000
#: Groups of partitions that have left a subject's route, stored in it, 100 bytes each; a forgotten one counts as new.
REMEMBERED_GROUPS_MAX: Final = 1_000


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a server. They bound its memory, whatever its clients do."""

    #: Connections; each costs about 20 KiB.
    connections: int = 10_000
    #: A connection is closed unless its hello arrives within this.
    hello_seconds: float = 10.0
    #: A connection that received nothing for this long is closed: its peer may be gone.
    idle_seconds: float = 30.0
    #: Bytes received and not yet stored, per connection; above it the server stops reading from the connection.
    in_flight_bytes_per_connection: int = 32 * MIB
    #: Bytes queued for one slow connection; above it the connection's requests wait.
    outgoing_bytes_per_connection: int = 8 * MIB
    #: Bytes queued for all connections; above it the connection with the most is closed.
    outgoing_bytes_total: int = 512 * MIB
    #: Suspended pulls of one connection.
    polls_per_connection: int = 10_000
    #: Bytes of partly received packets over all connections; above it the connection with the oldest one is closed.
    partial_bytes_total: int = 512 * MIB
    #: Subjects (each costs memory and a consume log file).
    subjects: int = 100_000
    #: Groups over all subjects. A group takes 3 KiB, an ordered group 4 KiB, or 15 KiB with a run of locks.
    #: Locks are stored as runs; a group in which neighbouring LPs all have different owners takes 2 MiB.
    groups: int = 300_000
    #: Attached consumers, including those without a connection until they count as lost.
    consumers: int = 100_000
    #: Separate ranges that one consumer holds; above it the consumer gets no new rows.
    consumer_ranges: int = 10_000
    #: Separate failed ranges of one group that wait for a retry; above it the group gets no new rows.
    retry_ranges: int = 500_000
    #: Messages of one group in the retained log: dead letters, and retries that retention removed from the message log
    #: (about 200 bytes each). Above it the group gets no new rows.
    retained_messages: int = 500_000
    #: Parked keys and keys with a failed message of one ordered group; above it the group gets no new rows.
    held_keys: int = 10_000
    #: An ordered consumer has its locks for this long after it last renewed them.
    lease_seconds: float = 10.0
    #: The broker waits longer by this share of ``lease_seconds``. The consumer counts from an earlier moment, so the
    #: margin only has to cover clocks that run at different speeds, where 1% would be much already.
    lease_margin: float = 0.05
    #: Cancelled and rescheduled messages, each remembered until its original due time; more requests are refused.
    schedule_settled: int = 1_000_000
    #: Stages that are not yet committed, 2 KiB each. A task of Spark's sink has one for each partition of its rows.
    stages: int = 100_000
    #: A stage that is not published holds its part of the message log for this long after its last row (7 days).
    stage_seconds: float = 7 * 86400.0
    #: Expired stages that are remembered, the newest ones, 2 KiB each. An unknown stage counts as published, so an
    #: expired one must be remembered while a driver may ask for it. No time bounds that, hence a number.
    stages_expired: int = 20_000
    #: Transactions that are not decided, including parked ones; above it no transaction begins. Each takes 1 KiB.
    transactions: int = 10_000
    #: Parked transactions, which wait for an operator; above it no transaction begins.
    transactions_parked: int = 5_000
    #: Half messages of one transaction, and their bytes.
    transaction_rows: int = 10_000
    transaction_bytes: int = 64 * MIB
    #: Half messages of all transactions, and their bytes in the message log. A checkpoint encodes the rows in one turn.
    half_rows: int = 100_000
    half_bytes: int = 4 * GIB
    #: The outcomes of the newest decided transactions are remembered, 100 bytes each, to answer late decisions.
    transactions_remembered: int = 50_000
    #: A producer is asked for the outcome of a transaction this long after its last half message...
    transaction_check_first_seconds: float = 6.0
    #: ...and then in this interval...
    transaction_check_seconds: float = 30.0
    #: ...at most this often. Then the transaction is parked.
    transaction_checks: int = 15
    #: Producers that wait for checks (long polls); one poll of each producer group of each client.
    transaction_polls: int = 20_000
    #: Producers remembered for idempotence; the one silent the longest is forgotten first.
    producers: int = 100_000
    #: A producer is forgotten after it was silent for this long (7 days).
    producer_seconds: float = 7 * 86400.0
    #: Frames per producer and partition that are recognised when they are resent, and get the same receipt again.
    producer_window_frames: int = 64
    #: The most messages of one pull.
    pull_count: int = 1_000_000
    #: The most bytes of one delivery; one frame is always delivered whole.
    pull_bytes: int = 16 * MIB
    #: The longest time that a pull is suspended.
    pull_wait_seconds: float = 60.0
    #: A consumer that was silent for this long is lost: its unacked messages go to other consumers.
    consumer_lost_seconds: float = 5.0
    #: Idle broadcast groups are forgotten after this (2 days: a client that was away for a weekend continues).
    group_forget_seconds: float = 2 * 86400.0
    #: Sends are refused while the oldest waiting send is older than this.
    queue_head_seconds: float = 0.2
    #: Sends are refused while one log write or sync has taken longer than this.
    log_busy_seconds: float = 1.0
    #: Rows of ordered groups whose keys are cached, 10 bytes each; the least recently used frame is evicted first.
    key_rows: int = 1 << 22
    #: Open maps of consume logs; the least recently read one is closed.
    open_maps: int = 1_000


class MetaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a meta server, and the times after which brokers and clients count as lost."""

    #: Subjects and groups in total: a meta server has all of them in memory (about 1 KiB each).
    subjects: int = 100_000
    groups: int = 300_000
    #: Recurrences in total: their definitions are read page by page, so the limit only protects the database.
    recurrences: int = 100_000
    #: Members of one group, all named in its allocation; groups of one client, all named in its heartbeat.
    members_per_group: int = 10_000
    groups_per_client: int = 10_000
    #: A broker that was silent for this long is lost: new subjects go to other brokers.
    broker_lost_seconds: float = 5.0
    #: A client that was silent for this long is lost: its logical partitions go to other members. As long as a
    #: consumer's lease: a shorter time would not help, because the client's locks last that long.
    member_lost_seconds: float = 10.0
    #: After a process was silent for this long, another process may use its client id. Heartbeats come every second, or
    #: every three seconds from a client whose loop is busy.
    speaker_seconds: float = 5.0
    #: How often the times of clients' heartbeats are written to the database, for other meta servers.
    heartbeat_flush_seconds: float = 2.0
    #: A pause of the meta server or its database counts as at most this much silence of others: well within a lease.
    gap_seconds: float = 2.0
    #: Attempts to make a change that conflicts with concurrent changes.
    attempts: int = 8
    #: Allocations are computed in slices of about this length, so that heartbeats are answered in between.
    slice_seconds: float = 0.001
    #: Groups whose allocations one transaction writes.
    write_groups: int = 64
    #: Members that left or are lost and that one step writes at once: more would delay heartbeats.
    write_members: int = 100
    #: Clients that one step checks, writes or removes.
    page: int = 500
    #: The commit of a batch of Spark's sink is remembered for this long after the last request of its query (30 days of
    #: the cluster's age, which does not depend on wall clocks).
    commit_seconds: float = 30 * 86400.0
    #: A commit that is not complete after this is completed by the next client that commits.
    commit_late_seconds: float = 60.0
    #: Deleted records are removed from the database after at least this long.
    clean_seconds: float = 600.0

    @classmethod
    def of_lease(cls, seconds: float) -> MetaLimits:
        """The limits for a consumer lease of ``seconds``: heartbeats reach other meta servers well within the lease."""
        usual = cls()
        return cls(
            member_lost_seconds=seconds,
            speaker_seconds=min(usual.speaker_seconds, seconds),
            heartbeat_flush_seconds=min(usual.heartbeat_flush_seconds, seconds / 4),
            gap_seconds=min(usual.gap_seconds, seconds / 3),
        )


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a client: what it buffers, and how long it waits."""

    #: A frame is sent when its bodies reach this size, ...
    frame_bytes: int = 256 * KIB
    #: ... or when it has this many rows.
    frame_count: int = 10_000
    #: Frames of ``send_many`` are larger, which costs less per byte.
    many_frame_bytes: int = 1 * MIB
    many_frame_count: int = 50_000
    #: A posted row is sent after it waited this long at most; an awaited send does not wait for it.
    linger_seconds: float = 0.005
    #: Bytes of rows that are not yet acknowledged, over all subjects: above it ``post`` raises and ``send`` waits.
    buffer_bytes: int = 64 * MIB
    #: Unacknowledged frames per partition, at most the server's ``producer_window_frames``.
    in_flight_frames: int = 16
    #: A send that has no reply after this raises ``Timeout``.
    send_seconds: float = 30.0
    #: The first and the longest pause before a refused send is repeated, and before a route is requested again.
    send_retry_first_seconds: float = 0.05
    send_retry_max_seconds: float = 1.0
    #: Partitions that a refused send is tried on, if its rows may go to another partition.
    send_attempts: int = 3
    #: When a broker was unreachable for this long, its rows go to another partition, if they may.
    unreached_seconds: float = 2.0
    #: Routes are refreshed this often, even if no request failed because of a stale route.
    route_seconds: float = 30.0
    #: The sender of a subject is dropped after this long without a send: a client may use any number of subjects.
    sender_idle_seconds: float = 600.0
    #: Connecting, the handshake and admin requests.
    request_seconds: float = 10.0
    #: Opening a client fails after this when every address refuses the connection: a server may be starting.
    refused_seconds: float = 2.0
    #: The first and the longest pause between attempts to reconnect.
    reconnect_first_seconds: float = 0.05
    reconnect_max_seconds: float = 2.0
    #: After a connection that lasted this long, the next pause is the first one again.
    reconnect_steady_seconds: float = 1.0
    #: The interval of heartbeats on each connection.
    heartbeat_seconds: float = 1.0
    #: What a consumer prefetches at most: unacked messages, their bytes, and the span of their sequences.
    prefetch_count: int = 1_000
    prefetch_bytes: int = 100 * MIB
    prefetch_span: int = 2_000
    #: The most bytes of one pull.
    pull_bytes: int = 1 * MIB
    #: How long a pull is suspended at the server before the client repeats it.
    pull_wait_seconds: float = 20.0
    #: Once a consumer is attached to one partition, opening it waits this long for the others; they may attach later.
    attach_seconds: float = 1.0
    #: An ordered consumer releases its locks when a message has been in handling for this long.
    handling_seconds: float = 900.0
    #: ``App``: how long handlers may run after SIGTERM before they are cancelled and their messages returned.
    drain_seconds: float = 30.0
    #: How long the check of a transaction may take, for which the next checks wait; then its broker asks again.
    check_seconds: float = 30.0
    #: ``App``: how long a cancelled ``async def`` handler may take to end: long enough to close a connection.
    cancel_seconds: float = 2.0
