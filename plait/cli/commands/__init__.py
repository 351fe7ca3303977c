"""The commands that are clients of a node, and those that read a data directory or an archive; one module each.

``plait.cli.entry`` and ``spark.commands`` import a module when its command runs. May import the client, the doctor and
``plait.spark``.
"""
