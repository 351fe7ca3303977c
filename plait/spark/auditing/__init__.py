"""The audit: checks the first-hand logs against Plait's promises, block by block, as array operations (docs/audit.md).

``job.audit`` is the entry. ``plait.spark.inputs`` reads a data directory or an archive, ``block`` judges
the rows of one block, ``verdicts`` compares rows with events, ``summary`` adds up the facts of all blocks into a
``report``. Only ``job`` needs Spark. May import storage, frame, model, the archive reader and ``plait.spark.runtime``;
not the broker, the server or the command line.
"""
