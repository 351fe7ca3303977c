"""Dead letters -> a report of why messages die: by reason, handler and hour, with example keys.

    python examples/dead_letters.py --server plait://127.0.0.1:7450 order.book billing

The letters come from the broker. The share of each hour's messages that died comes from the message log, which Spark
reads through the broker as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import plait.sync
from plait.spark import session

LETTER = "hour timestamp, type string, handler string, key string, attempts int"
KEYS_SHOWN = 3
#: The most letters that are read. With more, a sample shows the problem as well.
LETTERS_MAX = 100_000


def letters(spark: SparkSession, server: str, subject: str, group: str) -> DataFrame:
    """One row for each dead letter of the group."""
    with plait.sync.connect(server) as client:
        found = client.admin.dead_letters(subject, group, limit=LETTERS_MAX)
    rows = [
        (
            letter.store_time.replace(minute=0, second=0, microsecond=0),
            letter.reason.type,
            letter.reason.handler,
            letter.key,
            letter.attempts,
        )
        for letter in found
    ]
    return spark.createDataFrame(rows, LETTER)


def report(dead: DataFrame, messages: DataFrame) -> DataFrame:
    """Deaths by hour and reason, and their share of all messages of the hour."""
    totals = messages.groupBy(f.date_trunc("hour", "store_time").alias("hour")).agg(f.count("*").alias("messages"))
    return (
        dead.groupBy("hour", "type", "handler")
        .agg(
            f.count("*").alias("dead"),
            f.max("attempts").alias("attempts"),
            f.slice(f.array_sort(f.collect_set("key")), 1, KEYS_SHOWN).alias("keys"),
        )
        # Letters outlive messages: the share is unknown for an hour whose messages have expired.
        .join(totals, "hour", "left")
        .withColumn("share", f.round(f.col("dead") / f.col("messages"), 4))
        .orderBy("hour", f.desc("dead"), "type")
    )


def main(given: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Why messages die.")
    parser.add_argument("subject")
    parser.add_argument("group")
    parser.add_argument("--server", default="plait://127.0.0.1:7450")
    options = parser.parse_args(None if given is None else list(given))
    spark = session(app_name="dead-letters")
    source = spark.read.format("plait").option("server", options.server).option("subject", options.subject)
    messages = source.option("columns", "store_time").load()
    report(letters(spark, options.server, options.subject, options.group), messages).show(100, truncate=False)


if __name__ == "__main__":
    main()
