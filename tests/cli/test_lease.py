"""``--lease``: how long ordered consumers keep their locks at the broker and at the meta server."""

from __future__ import annotations

from pathlib import Path

import pytest

import plait
from plait.limits import MetaLimits
from tests.cli.commands import broker, meta, running
from tests.cli.commands import plait as command
from tests.client.support import until

SERVERS = {
    "serve": ("serve", "--data", "data", "--port", "0"),
    "broker": ("broker", "--group", "g1", "--meta", "plait://127.0.0.1:1", "--data", "data"),
    "meta": ("meta", "--database", "sqlite:///meta.db", "--port", "0"),
}


@pytest.mark.parametrize("arguments", SERVERS.values(), ids=SERVERS)
def test_a_lease_that_is_too_short_or_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    for lease in ("1s", "2h", "soon"):
        result = command(*arguments, "--lease", lease)
        assert result.returncode == 2
        assert lease.encode() in result.stderr
        assert result.stderr.endswith(b"(invalid_argument)\n")
    assert list(tmp_path.iterdir()) == []


async def leased(address: str) -> float:
    """The lease duration that a consumer receives."""
    async with plait.connect(address) as client, client.consumer("s", group="g", ordered=True) as consumer:
        (partition,) = consumer._clients
        await until(lambda: partition.rights.open.any())  # type: ignore[attr-defined]
        return float(partition.rights.seconds)  # type: ignore[attr-defined]


async def test_consumers_of_a_node_receive_its_lease(tmp_path: Path):
    with running("serve", "--data", str(tmp_path), "--port", "0", "--lease", "4s") as node:
        assert await leased(node.address) == 4.0


async def test_consumers_of_a_cluster_receive_the_brokers_lease(tmp_path: Path):
    with (
        meta(f"sqlite:///{tmp_path}/meta.db", "--lease", "3s") as server,
        broker("g1", server.address, tmp_path / "g1", "--lease", "3s"),
    ):
        assert await leased(server.address) == 3.0


@pytest.mark.parametrize(("lease", "flush"), [(2.0, 0.5), (10.0, 2.0), (60.0, 2.0)])
def test_meta_servers_share_heartbeats_well_within_a_lease(lease: float, flush: float):
    limits = MetaLimits.of_lease(lease)
    assert (limits.member_lost_seconds, limits.heartbeat_flush_seconds) == (lease, flush)
    # A pause of the meta server and a late heartbeat together are shorter than a lease.
    assert limits.gap_seconds + 1.0 < lease
