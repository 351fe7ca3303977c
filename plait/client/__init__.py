"""The client library: sends, consumes, reads and administers.

``client.Client`` is the entry point; ``plait`` and ``plait.sync`` export it. Applications, the command line, Spark jobs
and tests use this package. It talks to servers through ``plait.wire`` and may import ``plait.model``, ``plait.frame``
and ``plait.limits``, and nothing of the broker, the meta server or the storage.
"""
