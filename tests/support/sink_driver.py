"""A driver of a streaming query from one subject to another, as a process that can be killed.

``python -m tests.support.sink_driver ADDRESS SOURCE TARGET CHECKPOINT ROWS`` copies all messages, ROWS in a batch, and
ends.
"""

from __future__ import annotations

import sys

import plait.spark

#: Starting quickly matters more than running quickly.
CONFIG = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def main(address: str, source: str, target: str, checkpoint: str, rows: str) -> None:
    # A task whose worker is killed runs again.
    spark = plait.spark.session("sink-driver", master="local[2,4]", config=CONFIG)
    messages = (
        spark.readStream.format("plait")
        .option("server", address)
        .option("subject", source)
        .option("columns", "key,body")
        .option("maxMessagesPerTrigger", rows)
        .load()
    )
    query = (
        messages.writeStream.format("plait")
        .option("server", address)
        .option("subject", target)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
