"""The bounds of the outbox and of ``Dedup``, in the form of ``plait/limits.py``."""

from __future__ import annotations

from typing import Final

from plait.limits import MIB

#: The lease of a relay on its database. Another relay takes over when the lease was not renewed for this long.
OUTBOX_LEASE_SECONDS: Final = 5.0
#: How often a relay looks for rows that other processes have committed.
OUTBOX_POLL_SECONDS: Final = 0.1
#: The rows that one transaction of a relay assigns at most, and their bytes; one row may be larger.
OUTBOX_TURN_ROWS: Final = 1_000
OUTBOX_TURN_BYTES: Final = 8 * MIB
#: A frame of a relay: its rows and their bytes.
OUTBOX_FRAME_ROWS: Final = 500
OUTBOX_FRAME_BYTES: Final = 1 * MIB
#: Frames that a relay has assigned to one partition and that are not stored yet. The next one is assigned while the
#: first one is sent; more would only take memory while a broker is down.
OUTBOX_QUEUE_FRAMES: Final = 2
#: Subjects of which a relay leaves out only some LPs when it looks for rows; it leaves out others as a whole.
OUTBOX_PARTIAL_SUBJECTS: Final = 50
#: The ranges of such LPs in one search: each takes 30 µs, and two of the 32,766 parameters that SQLite accepts.
OUTBOX_PARTIAL_RANGES: Final = 2_000
#: The longest pause of a subject after an error.
OUTBOX_PAUSE_SECONDS: Final = 5.0
#: Message ids that ``Dedup`` keeps, over all groups of its table; older ones are deleted.
DEDUP_KEEP_IDS: Final = 1_000_000
#: Handled messages after which a process deletes old message ids.
DEDUP_CLEAN_EVERY: Final = 1_000
