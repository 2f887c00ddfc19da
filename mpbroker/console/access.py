"""How the console connects to its own broker: by which listener and which login."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.client.cluster import Cluster
from mpbroker.client.errors import SaslAuthenticationError
from mpbroker.client.settings import ADMIN_CONFIG, ClientSettings, parse_settings
from mpbroker.config.console_settings import login_mechanisms

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig
    from mpbroker.config.listeners import EndPoint

_TIMEOUT_MS: Final = 10_000


class Access(NamedTuple):
    """A listener that the console connects to.

    Attributes:
        bootstrap: the listener's address, as HOST:PORT.
        protocol: Kafka's name of the listener's protocol, such as SASL_SSL.
        mechanisms: the SASL mechanisms with a user and a password, in the order in
            which they are tried; empty: there is no login.
        trusted: a file with the certificates that the console trusts; None: it trusts
            those that the system trusts.
    """

    bootstrap: str
    protocol: str
    mechanisms: tuple[str, ...]
    trusted: str | None = None

    @property
    def needs_login(self) -> bool:
        return bool(self.mechanisms)

    def settings(self, mechanism: str, user: str, password: str) -> dict[str, object]:
        """Return the settings of a Kafka client that acts as one user."""
        found: dict[str, object] = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.protocol,
            "client.id": "mpbroker-console",
            "request.timeout.ms": _TIMEOUT_MS,
        }
        if mechanism:
            found |= {
                "sasl.mechanism": mechanism,
                "sasl.username": user,
                "sasl.password": password,
            }
        if self.protocol == "SASL_SSL":
            # The connection stays on this machine, and the certificate has the name by
            # which other machines reach it.
            found["ssl.endpoint.identification.algorithm"] = ""
            if self.trusted is not None:
                found["ssl.truststore.location"] = self.trusted
        return found

    def log_in(self, user: str, password: str) -> tuple[dict[str, object], Cluster]:
        """Log a user in; return the client settings that work, and a connected client.

        Raises:
            SaslAuthenticationError: no mechanism takes this user and password.
            MpbrokerError: the broker does not answer, or refuses for another reason.
        """
        refusal: SaslAuthenticationError | None = None
        for mechanism in self.mechanisms or ("",):
            settings = self.settings(mechanism, user, password)
            cluster = connect(settings)
            try:
                cluster.metadata([])
            except SaslAuthenticationError as error:
                cluster.close()
                refusal = error
            except BaseException:
                cluster.close()
                raise
            else:
                return settings, cluster
        assert refusal is not None
        raise refusal


def access_by(config: BrokerConfig, endpoint: EndPoint, address: str) -> Access:
    """Return how the console connects to a listener.

    Args:
        config: the broker's settings.
        endpoint: the listener.
        address: the listener's address for clients on this machine, as HOST:PORT.
    """
    is_sasl = endpoint.security_protocol.startswith("SASL")
    trusted = None
    if endpoint.security_protocol == "SASL_SSL":
        own = config.own_value(endpoint.listener_name, "ssl.truststore.location")
        found = own or config.ssl_truststore_location
        trusted = str(found) if found else None
    return Access(
        address,
        endpoint.security_protocol,
        login_mechanisms(config, endpoint) if is_sasl else (),
        trusted,
    )


def connect(settings: dict[str, object]) -> Cluster:
    """Return a client with these settings, which connects with its first request."""
    values = parse_settings(ADMIN_CONFIG, settings)
    client = ClientSettings.of(values, max_in_flight=1)
    return Cluster(client.bootstrap, _TIMEOUT_MS / 1000, client)


__all__ = ["Access", "access_by", "connect"]
