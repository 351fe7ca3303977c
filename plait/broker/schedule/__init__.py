"""The schedule: stores delayed messages and delivers them when they are due.

``Schedules`` has the rows that wait, and ``Upcoming`` finds the rows that are due next. ``BucketedRows`` moves rows to
buckets, ``DueDelivery`` delivers due rows, and ``Forwards`` sends due rows whose LP has moved to another broker. The
server calls ``delayed_requests``. May import other broker modules, ``frame``, ``model`` and ``storage``.
"""
