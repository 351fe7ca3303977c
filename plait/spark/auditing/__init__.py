"""The audit: what the first-hand logs say of Plait's promises, judged in blocks of arrays (docs/audit.md).

``job`` plans and schedules with Spark, ``block`` does one block's work, ``judging`` is where rows and events meet;
all but ``job`` runs without Spark.
"""
