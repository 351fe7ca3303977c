"""Runtime: finds Java, starts Spark sessions quickly, prepares workers and runs jobs.

`plait.spark.session` and `plait.spark.prepare` are defined here; all other packages of ``plait.spark`` run their tasks
through it. Only ``job_runner`` imports another package of ``plait.spark``: the tasks of ``archiving``.
"""
