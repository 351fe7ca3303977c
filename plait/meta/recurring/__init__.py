"""Recurring messages: definitions with a cron rule or an interval, and the exactly-once sending of their firings.

``occurrences.py`` computes times, ``definition.py`` checks definitions, ``recurrences.py`` lists and changes them,
``firings.py`` decides which are due and keeps their frames until a broker has stored them. Used by ``MetaService``.
"""
