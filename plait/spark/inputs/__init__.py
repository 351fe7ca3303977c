"""Inputs: what Spark jobs read messages from, one adapter for data directories, brokers and archives each.

The driver asks an input for partitions, sizes and tasks; a task reads its part in a worker. ``source`` uses the inputs.
The package may import ``archiving.manifest``, ``source.offsets``, ``source.read_options``, the client's reading modules
and storage. It does not import PySpark.
"""
