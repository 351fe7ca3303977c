"""One Spark session for all tests, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import plait.sync
from plait.spark.archiving import archiver as archiving
from plait.testing.embedded_broker import BlockingBroker
from tests.spark.archives import run_here
from tests.support.spark_session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Tests are many small jobs: fast compilation matters more than fast code.
TEST_CONFIG = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": 2,
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A real local session, made by ``plait.spark.session``."""
    with spark_session("local[2]", TEST_CONFIG) as session:
        yield session


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Archivers run their tasks in this process."""
    monkeypatch.setattr(archiving, "run_job", run_here)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The path of a data directory that does not exist yet."""
    return tmp_path / "data"


@pytest.fixture
def to(tmp_path: Path) -> Path:
    """The path of an archive that does not exist yet."""
    return tmp_path / "archive"


@pytest.fixture
def client(plait_broker: BlockingBroker) -> Iterator[plait.sync.Client]:
    """A client of the test's broker."""
    with plait.sync.connect(plait_broker.address) as connected:
        yield connected


@pytest.fixture(params=["server", "path"])
def place(request: pytest.FixtureRequest, plait_broker: BlockingBroker) -> dict[str, Any]:
    """A reader's options for the broker: its address or its directory."""
    return {"server": plait_broker.address} if request.param == "server" else {"path": plait_broker.data}
