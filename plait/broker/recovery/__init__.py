"""Checkpoints of a running broker, and the start from them and the logs.

``Snapshots`` copies the state for a checkpoint, ``Recovery`` restores it at a start and replays the logs, and
``SegmentHeaders`` makes the headers of new segments. The broker uses them. The server and the command line get the
``RecoveryReport`` of a start, and the doctor reads shards. This package may import the rest of ``broker``, ``frame``
and ``storage``, never ``server`` or ``client``.
"""
