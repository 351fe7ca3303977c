"""The logs of a data directory and their recovery.

``log`` is the append-only file format; the message log, the action log and the retained log are made of it, and the
consume log is derived. The broker writes them, the readers of ``storage.reading`` share their formats. It imports
``frame``, ``model`` and the disk.
"""
