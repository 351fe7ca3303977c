"""Reading the logs of a data directory that another process may be writing.

Nothing here changes, locks or repairs a file. Spark inputs, the archiver and the doctor use this package. It imports
``storage.logs``, ``frame`` and ``model``.
"""
