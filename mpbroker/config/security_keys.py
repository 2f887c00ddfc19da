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

from mpbroker.base.config_def import ConfigKey, ConfigType, at_least, list_of, one_of

_INT, _LONG, _STRING = ConfigType.INT, ConfigType.LONG, ConfigType.STRING
_LIST, _PASSWORD = ConfigType.LIST, ConfigType.PASSWORD

SECURITY_PROTOCOL_KEYS: Final = [
    ConfigKey(
        "sasl.enabled.mechanisms",
        _LIST,
        ("GSSAPI",),
        "SASL mechanisms offered: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER."
        " Kafka's default, Kerberos, is not served: a listener with SASL says which.",
    ),
    ConfigKey(
        "sasl.jaas.config",
        _PASSWORD,
        None,
        "Login settings of a SASL mechanism, set as"
        " listener.name.<listener>.<mechanism>.sasl.jaas.config. PLAIN takes its users"
        ' from it: user_alice="password".',
    ),
    ConfigKey(
        "sasl.mechanism.inter.broker.protocol",
        _STRING,
        "GSSAPI",
        "Accepted for files written for Kafka; with one broker there is no other"
        " to log in at.",
    ),
    ConfigKey(
        "connection.failed.authentication.delay.ms",
        _INT,
        100,
        "How long the answer to a failed authentication is held back.",
        validator=at_least(0),
    ),
    ConfigKey(
        "connections.max.reauth.ms",
        _LONG,
        0,
        "Time after which a SASL connection must authenticate again; 0 never.",
        validator=at_least(0),
    ),
    ConfigKey(
        "ssl.client.auth",
        _STRING,
        "none",
        "Whether clients must, may or need not show a certificate.",
        validator=one_of("required", "requested", "none"),
    ),
    ConfigKey(
        "ssl.protocol",
        _STRING,
        "TLSv1.3",
        "Accepted for files written for Kafka; ssl.enabled.protocols says which"
        " versions of TLS are offered.",
    ),
    ConfigKey(
        "ssl.enabled.protocols",
        _LIST,
        (
            "TLSv1.2",
            "TLSv1.3",
        ),
        "TLS versions offered.",
        validator=list_of("TLSv1.2", "TLSv1.3"),
    ),
    ConfigKey(
        "ssl.cipher.suites",
        _LIST,
        (),
        "Cipher suites offered, under Java's names or OpenSSL's; empty leaves it to"
        " OpenSSL. Those of TLSv1.3 cannot be chosen among, only left out altogether.",
    ),
    ConfigKey(
        "ssl.keystore.type",
        _STRING,
        "JKS",
        "Accepted for files written for Kafka; a key store is read as PEM, whatever"
        " is said here.",
    ),
    ConfigKey(
        "ssl.keystore.location",
        _STRING,
        None,
        "File in PEM with the broker's private key and certificates; read again when"
        " it changes.",
    ),
    ConfigKey(
        "ssl.keystore.password",
        _PASSWORD,
        None,
        "Accepted for files written for Kafka; of a file in PEM only the key may be"
        " encrypted, with ssl.key.password.",
    ),
    ConfigKey(
        "ssl.keystore.key",
        _PASSWORD,
        None,
        "The private key itself, in PEM.",
    ),
    ConfigKey(
        "ssl.keystore.certificate.chain",
        _PASSWORD,
        None,
        "The certificate chain itself, in PEM.",
    ),
    ConfigKey(
        "ssl.key.password",
        _PASSWORD,
        None,
        "Password of the private key.",
    ),
    ConfigKey(
        "ssl.truststore.type",
        _STRING,
        "JKS",
        "Accepted for files written for Kafka; a trust store is read as PEM,"
        " whatever is said here.",
    ),
    ConfigKey(
        "ssl.truststore.location",
        _STRING,
        None,
        "File in PEM with the certificates of the authorities that may vouch for"
        " clients; read again when it changes.",
    ),
    ConfigKey(
        "ssl.truststore.password",
        _PASSWORD,
        None,
        "Accepted for files written for Kafka; certificates in PEM have none.",
    ),
    ConfigKey(
        "ssl.truststore.certificates",
        _PASSWORD,
        None,
        "Trusted certificates themselves, in PEM.",
    ),
    ConfigKey(
        "ssl.principal.mapping.rules",
        _STRING,
        "DEFAULT",
        "Who a client certificate is: rules RULE:pattern/replacement/ with an L or U"
        " for lower or upper case behind it, and DEFAULT, the whole name, separated by"
        " commas; the first that matches counts.",
    ),
    ConfigKey(
        "connections.setup.timeout.ms",
        _INT,
        30000,
        "How long a client may take from its connection until TLS is agreed upon and it"
        " has authenticated; then the connection is closed. A key of mpbroker's own.",
        validator=at_least(1),
    ),
    ConfigKey(
        "sasl.server.max.receive.size",
        _INT,
        524288,
        "The longest request in bytes before a client has authenticated.",
        validator=at_least(1),
    ),
    ConfigKey(
        "sasl.plain.users.file",
        _STRING,
        None,
        "File with the users of SASL PLAIN, a line each: user:password. Read again when"
        " it changes. A key of mpbroker's own, beside Kafka's sasl.jaas.config.",
    ),
    ConfigKey(
        "sasl.oauthbearer.jwks.endpoint.url",
        _STRING,
        None,
        "Where the keys are that tokens must be signed with, as a JWKS: a file:/// URL,"
        " read again when it changes, or an https:// URL.",
        is_url=True,
    ),
    ConfigKey(
        "sasl.oauthbearer.expected.audience",
        _LIST,
        (),
        "Tokens must be for one of these; empty: for whomever they are.",
    ),
    ConfigKey(
        "sasl.oauthbearer.expected.issuer",
        _STRING,
        None,
        "Tokens must be issued by this one; unset: by anybody who has a key.",
    ),
    ConfigKey(
        "sasl.oauthbearer.scope.claim.name",
        _STRING,
        "scope",
        "Claim that holds the scope. Nothing is decided by it.",
    ),
    ConfigKey(
        "sasl.oauthbearer.sub.claim.name",
        _STRING,
        "sub",
        "Claim that says who it is.",
    ),
    ConfigKey(
        "sasl.oauthbearer.clock.skew.seconds",
        _INT,
        30,
        "By how much clocks may differ between the issuer of a token and this broker.",
        validator=at_least(0),
    ),
    ConfigKey(
        "sasl.oauthbearer.jwks.endpoint.refresh.ms",
        _LONG,
        3_600_000,
        "How often keys are fetched anew from a URL.",
        validator=at_least(1),
    ),
    ConfigKey(
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms",
        _LONG,
        100,
        "How long to wait after keys could not be fetched; doubled each time.",
        validator=at_least(1),
    ),
    ConfigKey(
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms",
        _LONG,
        10_000,
        "How long to wait at most after keys could not be fetched.",
        validator=at_least(1),
    ),
]
