"""The meta database: connection, schema, migrations, rows changed by compare-and-set, and the mirror in memory.

Used by the other packages of ``plait.meta`` and by the doctor. May import ``plait.model``, ``plait.errors``,
``plait.limits``, and from ``plait.meta`` only ``core`` and ``members`` (for the mirror's allocations).
"""
