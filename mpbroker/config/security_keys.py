"""The broker's keys of TLS and SASL: Kafka's, and three of ours.

Any of them may be set for one listener, as listener.name.NAME.KEY, and SASL's for one
mechanism of it, as listener.name.NAME.MECHANISM.KEY; so set they can change while the
broker serves, for new connections. Files that they name are read again when those
change.

Source: "Broker Configs" of the Apache Kafka 4.x documentation; KIP-651 (PEM), KIP-768
(OAUTHBEARER), KIP-368 (sessions), KIP-371 (mapping rules).
"""

from __future__ import annotations

from typing import Final

from mpbroker.base.config_def import ConfigType, at_least, list_of, one_of
from mpbroker.config.broker_key import BrokerKey, Reader

_INT, _LONG, _STRING = ConfigType.INT, ConfigType.LONG, ConfigType.STRING
_LIST, _PASSWORD = ConfigType.LIST, ConfigType.PASSWORD

SECURITY_PROTOCOL_KEYS: Final = [
    BrokerKey(
        "sasl.enabled.mechanisms",
        _LIST,
        ("GSSAPI",),
        "SASL mechanisms offered: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER."
        " Kafka's default, Kerberos, is not served: a listener with SASL says which.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.jaas.config",
        _PASSWORD,
        None,
        "Login settings of a SASL mechanism, set as"
        " listener.name.<listener>.<mechanism>.sasl.jaas.config. PLAIN takes its users"
        ' from it: user_alice="password".',
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.mechanism.inter.broker.protocol",
        _STRING,
        "GSSAPI",
        "With one broker there is no other to log in at.",
        reader=Reader.NONE,
        has_effect=False,
    ),
    BrokerKey(
        "connection.failed.authentication.delay.ms",
        _INT,
        100,
        "How long the answer to a failed authentication is held back.",
        validator=at_least(0),
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "connections.max.reauth.ms",
        _LONG,
        0,
        "Time after which a SASL connection must authenticate again; 0 never.",
        validator=at_least(0),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "ssl.client.auth",
        _STRING,
        "none",
        "Whether clients must, may or need not show a certificate.",
        validator=one_of("required", "requested", "none"),
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "ssl.protocol",
        _STRING,
        "TLSv1.3",
        "Ssl.enabled.protocols says which versions of TLS are offered.",
        reader=Reader.SECURITY,
        per_listener=True,
        has_effect=False,
    ),
    BrokerKey(
        "ssl.enabled.protocols",
        _LIST,
        (
            "TLSv1.2",
            "TLSv1.3",
        ),
        "TLS versions offered.",
        validator=list_of("TLSv1.2", "TLSv1.3"),
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "ssl.cipher.suites",
        _LIST,
        (),
        "Cipher suites offered, under Java's names or OpenSSL's; empty leaves it to"
        " OpenSSL. Those of TLSv1.3 cannot be chosen among, only left out altogether.",
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "ssl.keystore.type",
        _STRING,
        "JKS",
        "A key store is read as PEM, whatever is said here.",
        reader=Reader.SECURITY,
        per_listener=True,
        has_effect=False,
    ),
    BrokerKey(
        "ssl.keystore.location",
        _STRING,
        None,
        "File in PEM with the broker's private key and certificates; read again when"
        " it changes.",
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "ssl.keystore.password",
        _PASSWORD,
        None,
        "Of a file in PEM only the key may be encrypted, with ssl.key.password.",
        reader=Reader.SECURITY,
        per_listener=True,
        has_effect=False,
    ),
    BrokerKey(
        "ssl.keystore.key",
        _PASSWORD,
        None,
        "The private key itself, in PEM.",
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "ssl.keystore.certificate.chain",
        _PASSWORD,
        None,
        "The certificate chain itself, in PEM.",
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "ssl.key.password",
        _PASSWORD,
        None,
        "Password of the private key.",
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "ssl.truststore.type",
        _STRING,
        "JKS",
        "A trust store is read as PEM, whatever is said here.",
        reader=Reader.SECURITY,
        per_listener=True,
        has_effect=False,
    ),
    BrokerKey(
        "ssl.truststore.location",
        _STRING,
        None,
        "File in PEM with the certificates of the authorities that may vouch for"
        " clients; read again when it changes.",
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "ssl.truststore.password",
        _PASSWORD,
        None,
        "Certificates in PEM have none.",
        reader=Reader.SECURITY,
        per_listener=True,
        has_effect=False,
    ),
    BrokerKey(
        "ssl.truststore.certificates",
        _PASSWORD,
        None,
        "Trusted certificates themselves, in PEM.",
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "ssl.principal.mapping.rules",
        _STRING,
        "DEFAULT",
        "Who a client certificate is: rules RULE:pattern/replacement/ with an L or U"
        " for lower or upper case behind it, and DEFAULT, the whole name, separated by"
        " commas; the first that matches counts.",
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "connections.setup.timeout.ms",
        _INT,
        30000,
        "How long a client may take from its connection until TLS is agreed upon and it"
        " has authenticated; then the connection is closed. A key of mpbroker's own.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
    ),
    BrokerKey(
        "sasl.server.max.receive.size",
        _INT,
        524288,
        "The longest request in bytes before a client has authenticated.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.plain.users.file",
        _STRING,
        None,
        "File with the users of SASL PLAIN, a line each: user:password. Read again when"
        " it changes. A key of mpbroker's own, beside Kafka's sasl.jaas.config.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.oauthbearer.jwks.endpoint.url",
        _STRING,
        None,
        "Where the keys are that tokens must be signed with, as a JWKS: a file:/// URL,"
        " read again when it changes, or an https:// URL.",
        is_url=True,
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.oauthbearer.expected.audience",
        _LIST,
        (),
        "Tokens must be for one of these; empty: for whomever they are.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.oauthbearer.expected.issuer",
        _STRING,
        None,
        "Tokens must be issued by this one; unset: by anybody who has a key.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.oauthbearer.scope.claim.name",
        _STRING,
        "scope",
        "Claim that holds the scope. Nothing is decided by it.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.oauthbearer.sub.claim.name",
        _STRING,
        "sub",
        "Claim that says who it is.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.oauthbearer.clock.skew.seconds",
        _INT,
        30,
        "By how much clocks may differ between the issuer of a token and this broker.",
        validator=at_least(0),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.oauthbearer.jwks.endpoint.refresh.ms",
        _LONG,
        3_600_000,
        "How often keys are fetched anew from a URL.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms",
        _LONG,
        100,
        "How long to wait after keys could not be fetched; doubled each time.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
    BrokerKey(
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms",
        _LONG,
        10_000,
        "How long to wait at most after keys could not be fetched.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    ),
]
