"""The schedule: stores delayed messages and delivers them when they are due.

``Schedules`` (used by the broker) owns the delayed rows of all subjects, ``Forwards`` sends due rows whose LP has moved
to the partition that the route leads to, and ``schedule_views`` (used by the server) lists and counts waiting rows. It
may import other broker modules, ``frame``, ``model`` and ``storage``.
"""
