"""The schedule: stores delayed messages and delivers them when they are due.

``Schedules`` knows the rows that wait, ``Upcoming`` which of them are due next, ``BucketedRows`` moves them to buckets,
``DueDelivery`` delivers due rows and ``Forwards`` sends those whose LP has moved to another broker. The server calls
``changes`` and ``schedule_views``. May import other broker modules, ``frame``, ``model`` and ``storage``.
"""
