"""Source, archive and audit on a real standalone cluster, whose executors are separate processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import plait.spark
import plait.sync
from plait.testing import EmbeddedBroker
from tests.support.spark_cluster import spark_cluster
from tests.support.spark_session import spark_session

MESSAGES = 20_000
CONFIG = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@pytest.mark.deep("spark")
def test_source_archive_and_audit_on_a_standalone_cluster(tmp_path: Path):
    data, archive = tmp_path / "data", tmp_path / "archive"
    bodies = [b"%d" % number for number in range(MESSAGES)]
    with EmbeddedBroker(data) as broker, spark_cluster(tmp_path) as master:
        with plait.sync.connect(broker.address) as client:
            client.send_many("orders", bodies, keys=[f"k{number % 100}" for number in range(MESSAGES)])
            with client.consumer("orders", group="billing") as consumer:
                done = 0
                while done < MESSAGES:
                    batch = consumer.fetch(5_000, wait=1.0)
                    batch.ack()
                    done += len(batch)
        with spark_session(master, CONFIG) as spark:
            for place in ({"path": str(data)}, {"server": broker.address}):
                read = spark.read.format("plait").options(subject="orders", minPartitions=4, **place).load()
                ((count, different),) = read.selectExpr("count(*)", "count(distinct message_id)").collect()
                assert (count, different) == (MESSAGES, MESSAGES)
            report = plait.spark.archive(data, archive, spark=spark, now=True)
            assert report.messages == MESSAGES
            found = spark.read.format("plait").option("subject", "orders").load(str(archive))
            assert found.where("key = 'k7'").count() == MESSAGES // 100
            for audited in (
                plait.spark.audit(data, spark=spark),
                plait.spark.audit(archive=str(archive), spark=spark),
            ):
                assert audited.held
                assert audited.judged
                (group,) = audited.groups()
                assert (group.messages, group.acked) == (MESSAGES, MESSAGES)
