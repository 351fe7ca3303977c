"""A driver of a streaming query, as a process that can be killed: files in, messages out.

``python -m tests.support.sink_driver ADDRESS SUBJECT SOURCE CHECKPOINT`` goes through all files there are, two a batch
with a task each, and ends.
"""

from __future__ import annotations

import sys

import plait.spark

#: Starting quickly matters more than running quickly; and each file is a task of its own.
CONFIG = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.files.maxPartitionBytes": 1 << 26,
    "spark.sql.files.openCostInBytes": 1 << 26,
}


def main(address: str, subject: str, source: str, checkpoint: str) -> None:
    spark = plait.spark.session("sink-driver", master="local[2]", config=CONFIG)
    files = spark.readStream.schema("key string, body string").option("maxFilesPerTrigger", 2).parquet(source)
    query = (
        files.writeStream.format("plait")
        .option("server", address)
        .option("subject", subject)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
