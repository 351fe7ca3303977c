"""The inputs of an audit: a data directory (``live_input``) or an archive (``archived_input``), as ``AuditInput``.

An input plans the work and reads the rows and events of one block. The rest of ``plait.spark.auditing`` uses it. May
import storage, frame, model and the archive reader; needs no Spark.
"""
