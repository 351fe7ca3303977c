"""A streaming query from a broker to Parquet files, as a process that tests kill.

Prints the number of each batch once it is done, and runs until it is killed. A query that fails ends the process.
"""

from __future__ import annotations

import sys

import plait.spark
from tests.spark.conftest import TEST_CONFIG

#: Small enough for many batches, and large enough for some with several frames.
MESSAGES_PER_TRIGGER = 300
#: The interval between two looks for a new batch.
LOOK_SECONDS = 0.02


def run(server: str, out: str, checkpoint: str) -> None:
    # A task whose worker is killed is retried.
    spark = plait.spark.session("plait-stream", master="local[2,4]", config=TEST_CONFIG)
    source = spark.readStream.format("plait").options(
        server=server, subject="orders", columns="partition,sequence,body", maxMessagesPerTrigger=MESSAGES_PER_TRIGGER
    )
    query = source.load().writeStream.option("checkpointLocation", checkpoint).start(out, "parquet")
    done = -1
    while not query.awaitTermination(LOOK_SECONDS):
        progress = query.lastProgress
        if progress is not None and progress.batchId > done and progress.numInputRows:
            done = progress.batchId
            print(done, flush=True)


if __name__ == "__main__":
    run(*sys.argv[1:])
