"""Consumers of several subjects: one fetcher for each subject, which share limits, waiting callers and one user.

``SeveralFetcher`` has what ``Consumer`` needs of a fetcher. ``SubjectWatch`` asks a meta server which subjects match.
``consumers.py`` uses this package, which may import the rest of ``plait.client.consume``.
"""
