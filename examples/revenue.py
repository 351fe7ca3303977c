"""Order events -> revenue of every minute: a streaming aggregation that writes Parquet and sends the figures back.

    python examples/revenue.py --server plait://127.0.0.1:7450 --state ./revenue
    plait tail order.revenue

Order events are JSON: ``{"city": "BJS", "amount": 5, "at": "2030-01-01T12:00:07Z"}``. A minute is closed when an event
arrives that is later by LATENESS. It is then written once, to Parquet and to the subject ``order.revenue``, keyed by
city. A job that is killed and started again with the same ``--state`` resumes where it stopped, and writes no figure
twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from plait.spark import session

EVENT = "city string, amount double, at timestamp"
#: Later events are not counted.
LATENESS = "30 seconds"


def revenue(events: DataFrame) -> DataFrame:
    """Sum and number of orders by minute and city."""
    orders = events.select(f.from_json(f.col("body").cast("string"), EVENT).alias("order")).select("order.*")
    return (
        orders.withWatermark("at", LATENESS)
        .groupBy(f.window("at", "1 minute"), "city")
        .agg(f.sum("amount").alias("revenue"), f.count("*").alias("orders"))
        .select(f.col("window.start").alias("minute"), "city", "revenue", "orders")
    )


def start(
    spark: SparkSession, server: str, subject: str, target: str, state: Path, *, once: bool
) -> list[StreamingQuery]:
    """Start both queries; with ``once`` they end after the messages that exist now."""
    trigger = {"availableNow": True} if once else {"processingTime": "5 seconds"}
    events = spark.readStream.format("plait").option("server", server).option("subject", subject)
    figures = revenue(events.option("startingOffsets", "earliest").option("columns", "body").load())
    stored = (
        figures.writeStream.format("parquet")
        .option("path", str(state / "minutes"))
        .option("checkpointLocation", str(state / "to-parquet"))
    )
    # A key must not be empty: an event without a city gets no key.
    key = f.nullif(f.col("city"), f.lit(""))
    messages = figures.select(key.alias("key"), f.to_json(f.struct("*")).alias("body"))
    sent = (
        messages.writeStream.format("plait")
        .option("server", server)
        .option("subject", target)
        .option("checkpointLocation", str(state / "to-plait"))
    )
    return [writer.outputMode("append").trigger(**trigger).start() for writer in (stored, sent)]


def main(given: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Order events to revenue by minute and city.")
    parser.add_argument("--server", default="plait://127.0.0.1:7450")
    parser.add_argument("--subject", default="order.events")
    parser.add_argument("--to", default="order.revenue", help="the subject that the figures are sent to")
    parser.add_argument(
        "--state", type=Path, required=True, help="a directory for the Parquet files and Spark's checkpoints"
    )
    parser.add_argument("--once", action="store_true", help="process the messages that exist now, and end")
    options = parser.parse_args(None if given is None else list(given))
    spark = session(app_name="revenue")
    state = options.state.resolve()
    for query in start(spark, options.server, options.subject, options.to, state, once=options.once):
        query.awaitTermination()
    spark.read.parquet(str(state / "minutes")).orderBy("minute", "city").show(50, truncate=False)


if __name__ == "__main__":
    main()
