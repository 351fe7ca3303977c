"""Archiving: copies the first-hand logs of data directories to Parquet files, and keeps the manifest of an archive.

`plait.spark.archive` and the CLI run the archiver; ``inputs``, ``history`` and ``auditing`` read manifests and files.
The package may import ``runtime``, ``source.spark_columns``, storage, frame and model. Only the archiver itself needs
Spark: manifests, tables and files are read and written without it.
"""
