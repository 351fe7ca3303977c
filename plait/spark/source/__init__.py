"""Source: ``spark.read`` and ``spark.readStream`` with ``format("plait")``.

Spark calls ``data_source``; `plait.spark.register` registers it. The package parses options, plans ranges of sequences
and makes Arrow columns of frames; ``inputs`` reads the frames. ``archiving`` and ``history`` use its columns and
scalars. It may import ``inputs``, ``sink``, ``runtime``, the client's reading modules, storage and frame.
"""
