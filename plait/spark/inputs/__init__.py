"""Inputs: what Spark jobs read messages from. Each kind has one family of modules: ``log_*`` reads data directories,
``broker_*`` asks brokers, ``archive*`` reads archives.

For ``source``, an input lists partitions and makes tasks. For ``auditing``, it plans blocks of rows and
finds the events about them (``audit_input``). A task reads its part in a worker, without the driver. The package may
import ``archiving.manifest``, options and offsets of ``source``, arrays and group facts of ``auditing``, the client's
reading modules and storage. It does not import PySpark.
"""
