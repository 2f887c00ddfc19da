"""A broker in a container, for tests that have Docker (testcontainers).

    from mpbroker.testing.testcontainer import MpbrokerContainer

    with MpbrokerContainer("mpbroker") as broker:
        producer = MyProducer(broker.get_bootstrap_server())

Clients dial a port of the host, which the container engine chooses when the container
starts. The broker must tell clients that port. So the container waits until it has got
its address, and then starts the broker.
"""

from __future__ import annotations

import time
from typing import Any, Final, Self

from testcontainers.core.container import DockerContainer

from mpbroker.base.errors import MpbrokerError
from mpbroker.config.sources import variable_of

_ADDRESS: Final = "/tmp/mpbroker-address"
_SERVE: Final = (
    f"until [ -e {_ADDRESS} ]; do sleep 0.05; done;"
    f" MPBROKER_ADVERTISED_LISTENERS=$(cat {_ADDRESS}) exec mpbroker serve"
)
_PAUSE_S: Final = 0.1


class ContainerNotReadyError(MpbrokerError):
    """The broker in a container did not begin to serve; the text has its log."""


class MpbrokerContainer(DockerContainer):
    """A container with one broker, on a port of the host that the engine chooses."""

    def __init__(
        self,
        image: str = "mpbroker",
        port: int = 9092,
        timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        """Describe a container; nothing is started yet.

        Args:
            image: the name of the image that deploy/Dockerfile builds.
            port: the port on which the broker listens inside the container.
            timeout_s: how long `start` waits until the broker serves, in seconds.
            kwargs: further arguments of `DockerContainer`.
        """
        super().__init__(image, **{"entrypoint": ["sh", "-c", _SERVE], **kwargs})
        self._port = port
        self._timeout_s = timeout_s
        self.with_exposed_ports(port)
        self.with_env("MPBROKER_LISTENERS", f"PLAINTEXT://0.0.0.0:{port}")
        # As the plug-in for pytest: tests do not cut the power, and are in a hurry.
        self.with_setting("log.flush.acks.all", "false")
        self.with_setting("group.initial.rebalance.delay.ms", 0)

    def with_setting(self, name: str, value: object) -> Self:
        """Give the broker a setting, such as num.partitions."""
        return self.with_env(variable_of(name), str(value))

    def start(self) -> Self:
        """Start the container, and wait until the broker serves.

        Raises:
            ContainerNotReadyError: the container has ended, or does not serve in time;
                it is left as it is.
        """
        super().start()
        address = f"PLAINTEXT://{self.get_bootstrap_server()}"
        # Write the address by a rename, so that the shell never reads half of it.
        written = f"echo {address} > {_ADDRESS}.new && mv {_ADDRESS}.new {_ADDRESS}"
        self._execute("sh", "-c", written)
        deadline = time.monotonic() + self._timeout_s
        while self._execute("mpbroker", "ctl", "status", "--quiet") != 0:
            if self._has_ended() or time.monotonic() > deadline:
                log = b"".join(self.get_logs()).decode(errors="replace")
                raise ContainerNotReadyError(f"the broker does not serve:\n{log}")
            time.sleep(_PAUSE_S)
        return self

    def _has_ended(self) -> bool:
        container = self.get_wrapped_container()
        container.reload()
        return container.status in ("exited", "dead")

    def _execute(self, *words: str) -> int | None:
        return self.exec(list(words)).exit_code

    def get_bootstrap_server(self) -> str:
        """Return the value for bootstrap.servers, HOST:PORT."""
        return f"{self.get_container_host_ip()}:{self.get_exposed_port(self._port)}"
