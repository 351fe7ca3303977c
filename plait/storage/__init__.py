"""The files of a data directory: logs, checkpoints, recovery, and the state that is derived from the logs.

The broker writes them; Spark jobs and the doctor read them, also while a broker writes. All disk access goes through
``disk.py``, so that tests can replace the disk. The package imports ``frame``, ``model`` and the top-level modules,
never the broker.
"""
