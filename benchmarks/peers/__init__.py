"""The message queues that Plait is compared with, measured by the same program on the same machine.

`python -m benchmarks.peers` starts each peer as a private server on a free loopback port with a temporary
data directory, measures it through its usual Python client, and ends it. Nothing that already runs is
touched. The servers come from Debian packages (redis-server, nats-server, rabbitmq-server) and Maven
Central (Kafka, RocketMQ); the clients from requirements.txt beside this file. A peer that is not installed
is skipped, with the reason.
"""

from benchmarks.peers.base import Latency, Peer, Throughput
from benchmarks.peers.errors import PeerError, PeerUnavailable
from benchmarks.peers.redis_streams import RedisStreams, fastest_redis, redis_awaiting_64, redis_pipelined_e2e

__all__ = [
    "Latency",
    "Peer",
    "PeerError",
    "PeerUnavailable",
    "RedisStreams",
    "Throughput",
    "fastest_redis",
    "redis_awaiting_64",
    "redis_pipelined_e2e",
]
