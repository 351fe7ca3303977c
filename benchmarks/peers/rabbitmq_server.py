"""A private RabbitMQ node: own name, own cookie, own port mapper, everything on loopback.

Erlang nodes find each other through one epmd for the whole machine, which the first node starts and does
not end. Here epmd gets its own port and belongs to the benchmark, so that it does not meet a RabbitMQ that
already runs, and no process is left afterwards. Debian's wrapper script switches to the system account and
its directories; the script that the wrapper calls uses the environment instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.errors import PeerUnavailable
from benchmarks.peers.server import LOOPBACK, ServerProcess, accepts, free_port

USER = "guest"
PASSWORD = "guest"
START_SECONDS_MAX = 120.0
_DEBIAN_SCRIPT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class RabbitNode:
    """The node's processes and ports. `servers` grows as they start, so that a failed start can be undone."""

    def __init__(self, servers: list[ServerProcess]) -> None:
        self._servers = servers
        self.amqp_port = 0
        self.stream_port = 0

    def start(self) -> None:
        epmd_port, distribution_port = free_port(), free_port()
        self.amqp_port, self.stream_port = free_port(), free_port()
        mapper = ServerProcess("epmd")
        self._servers.append(mapper)
        mapper.start([_found("epmd"), "-port", str(epmd_port), "-address", LOOPBACK], ready=lambda: accepts(epmd_port))
        node = ServerProcess("rabbitmq")
        self._servers.append(node)
        directory = node.directory
        (directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = {LOOPBACK}:{self.amqp_port}\n"
            f"stream.listeners.tcp.1 = {LOOPBACK}:{self.stream_port}\n"
            f"stream.advertised_host = {LOOPBACK}\n"
            f"stream.advertised_port = {self.stream_port}\n"
            "log.console.level = warning\n"
            "log.file = false\n"
        )
        (directory / "enabled_plugins").write_text("[rabbitmq_stream].\n")
        node.start(
            [str(_script())],
            ready=lambda: accepts(self.amqp_port) and accepts(self.stream_port),
            environment=_environment(directory, epmd_port, distribution_port),
            seconds_max=START_SECONDS_MAX,
        )


def rabbitmq_version() -> str:
    """The version of the installed server, from the directory that Debian installs it to."""
    release = _script().resolve().parent.parent.name
    return release.removeprefix("rabbitmq_server-")


def _environment(directory: Path, epmd_port: int, distribution_port: int) -> Mapping[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(directory),
        "ERL_EPMD_ADDRESS": LOOPBACK,
        "ERL_EPMD_PORT": str(epmd_port),
        "RABBITMQ_NODENAME": "plait-bench@localhost",
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "config"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
    }


def _script() -> Path:
    if _DEBIAN_SCRIPT.exists():
        return _DEBIAN_SCRIPT
    return Path(_found("rabbitmq-server"))


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise PeerUnavailable(f"{program} not found on the PATH; tools/debian-install rabbitmq-server")
    return path
