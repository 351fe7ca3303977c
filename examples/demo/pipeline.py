"""The data pipeline: ``python -m examples.demo.pipeline DATA_DIR SUBJECT ARCHIVE``.

Starts its Spark session and prints ``started``. After a line on standard input it counts the messages in the log files,
archives both logs, and audits the archive. It prints each step and each result as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The number of messages, of distinct ones, and of events that do not follow their producer's previous one in the log.
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
#: For one query the optimizing compiler of Java costs more than it saves.
SHORT_LIFE = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def check(spark: SparkSession, path: str, subject: str) -> dict[str, Any]:
    """Count and check the messages of a subject from the files of a data directory."""
    messages = spark.read.format("plait").option("path", path).option("subject", subject).load()
    messages.createOrReplaceTempView("messages")
    (row,) = spark.sql(QUERY).collect()
    return row.asDict()


class Steps:
    """Prints the current step."""

    def step(self, name: str, total: int | None = None, unit: str = "") -> None:
        print_line("step", name)

    def update(self, done: int) -> None:
        """Print nothing: the steps are short."""


def print_line(what: str, value: object) -> None:
    print(json.dumps({what: value}), flush=True)


def work(spark: SparkSession, path: str, subject: str, to: str) -> None:
    """Count, archive and audit."""
    from plait.spark import archive, audit

    print_line("counted", check(spark, path, subject))
    archived = archive(path, to, spark=spark, now=True, progress=Steps())
    print_line("archived", {"messages": archived.messages, "events": archived.events, "files": archived.files})
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
    print_line("audited", {"held": report.held, "judged": report.judged, "broken": broken, **figures})


def main() -> None:
    from plait.spark import SparkUnavailable, session

    path, subject, to = sys.argv[1:]
    try:
        spark = session(app_name="plait-demo", master="local[2]", config=SHORT_LIFE)
    except SparkUnavailable as error:
        sys.exit(f"{error.message}; or use --no-spark")
    try:
        print("started", flush=True)
        if sys.stdin.readline():
            work(spark, path, subject, to)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
