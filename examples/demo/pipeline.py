"""The data pipeline: ``python -m examples.demo.pipeline DATA_DIR SUBJECT ARCHIVE``.

Starts its Spark session and prints ``started``. After a line on standard input it counts the messages in the log files,
archives both logs, and audits the archive; what each came to is a line of JSON, and so is every step on the way.
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


class Steps:
    """Says which step is under way."""

    def step(self, name: str, total: int | None = None, unit: str = "") -> None:
        tell("step", name)

    def update(self, done: int) -> None:
        """Steps are short here."""


def tell(what: str, value: object) -> None:
    print(json.dumps({what: value}), flush=True)


def work(spark: SparkSession, path: str, subject: str, to: str) -> None:
    """All of it, one after another."""
    from plait.spark import archive, audit

    tell("counted", check(spark, path, subject))
    archived = archive(path, to, spark=spark, now=True, progress=Steps())
    tell("archived", {"messages": archived.messages, "events": archived.events, "files": archived.files})
    report = audit(archive=to, spark=spark, progress=Steps())
    groups = report.groups()
    broken = [f"{group.subject}, group {group.group}: {', '.join(group.broken)}" for group in groups if group.broken]
    broken += [f"{each.subject}: {each.missing} missing" for each in report.subjects if each.missing]
    figures = {
        "subjects": len(report.subjects),
        "groups": len(groups),
        "messages": sum(each.messages for each in report.subjects),
        "acked": sum(group.acked for group in groups),
        "redelivered": sum(sum(group.redelivered.values()) for group in groups),
        "dead": sum(group.died for group in groups),
    }
    tell("audited", {"held": report.held, "judged": report.judged, "broken": broken, **figures})


def main() -> None:
    from plait.spark import SparkUnavailable
    from plait.spark.runtime import session

    path, subject, to = sys.argv[1:]
    try:
        spark = session(app_name="plait-demo", master="local[2]", config=SHORT_LIFE)
    except SparkUnavailable as error:
        sys.exit(f"{error.message}; or leave it out with --no-spark")
    try:
        print("started", flush=True)
        if sys.stdin.readline():
            work(spark, path, subject, to)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
