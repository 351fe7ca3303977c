"""The peers by name, in the order in which they are run."""

from benchmarks.peers.base import Peer
from benchmarks.peers.kafka import Kafka
from benchmarks.peers.nats_jetstream import NatsJetStream
from benchmarks.peers.rabbitmq_classic import RabbitClassic
from benchmarks.peers.rabbitmq_stream import RabbitStream
from benchmarks.peers.redis_streams import RedisStreams, RedisStreamsHiredis
from benchmarks.peers.rocketmq import RocketMQ

PEERS: dict[str, type[Peer]] = {
    kind.name: kind
    for kind in (
        RedisStreams,
        RedisStreamsHiredis,
        NatsJetStream,
        RabbitClassic,
        RabbitStream,
        Kafka,
        RocketMQ,
    )
}
