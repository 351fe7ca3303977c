"""Spark over the log files: ``python -m plait.demo.spark_check DATA_DIR SUBJECT``.

Starts its session, prints ``started``, waits for a line on standard input, and prints what it counted as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Messages, different ones, and how often a producer's event is not the one after its last, in the order of the log.
QUERY = """
WITH events AS (
    SELECT sequence, message_id, key,
           from_json(CAST(body AS STRING), 'order STRING, step STRING, producer INT, number INT') AS event
    FROM messages
), ordered AS (
    SELECT message_id, key, event,
           LAG(event.number, 1, -1) OVER (PARTITION BY event.producer ORDER BY sequence) AS before
    FROM events
)
SELECT COUNT(*) AS messages,
       COUNT(DISTINCT message_id) AS different,
       COUNT_IF(event.order != key) AS wrong_keys,
       COUNT_IF(event.number != before + 1) AS out_of_order,
       COUNT_IF(event.step = 'done') AS orders
FROM ordered
"""
#: A Java that lives for one query does not earn back what its best compiler costs.
SHORT_LIFE = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def check(spark: SparkSession, path: str, subject: str) -> dict[str, Any]:
    """Count and check the messages of a subject from the files of a data directory."""
    messages = spark.read.format("plait").option("path", path).option("subject", subject).load()
    messages.createOrReplaceTempView("messages")
    (row,) = spark.sql(QUERY).collect()
    return row.asDict()


def main() -> None:
    from plait.spark import SparkUnavailable, session

    path, subject = sys.argv[1:]
    try:
        spark = session(app_name="plait-demo", master="local[2]", config=SHORT_LIFE)
    except SparkUnavailable as error:
        sys.exit(f"{error.message}; or leave it out with --no-spark")
    try:
        print("started", flush=True)
        if sys.stdin.readline():
            print(json.dumps(check(spark, path, subject)), flush=True)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
