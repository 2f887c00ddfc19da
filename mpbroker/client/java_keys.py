"""Settings of Kafka's Java clients that have no meaning here, with advice for each.

They are refused, because a setting without an effect deceives its user. The error says
what to set instead.

Source: the "Producer Configs" and "Consumer Configs" of the Apache Kafka documentation.
"""

from __future__ import annotations

from typing import Final

_PEM: Final = (
    "this client reads PEM, whose trusted certificates have no password. `keytool"
    " -exportcert -rfc` or `openssl pkcs12 -nokeys` writes them; name the file in"
    " ssl.truststore.location"
)
_PEM_KEY: Final = (
    "this client reads PEM. `openssl pkcs12 -in FILE -out FILE.pem` writes it; name the"
    " file in ssl.keystore.location, and its password in ssl.key.password"
)
_OPENSSL: Final = "OpenSSL is used, which needs no such name; leave it out"
_METRICS: Final = (
    "metrics() returns Kafka's metrics whenever it is called; leave it out"
)
_GSSAPI: Final = "there is no Kerberos here; see sasl.mechanism"
_TOKEN: Final = "give a function that returns a token: sasl.oauthbearer.token.provider"
_LOGIN: Final = (
    "give user and password as sasl.username and sasl.password, or a function that"
    " returns a token as sasl.oauthbearer.token.provider"
)

JKS_ADVICE: Final = {"ssl.truststore.type": _PEM, "ssl.keystore.type": _PEM_KEY}

# By key; a key that ends with a dot stands for all that begin so.
_ADVICE: Final = {
    "ssl.truststore.password": _PEM,
    "ssl.keystore.password": _PEM_KEY,
    "ssl.protocol": "see ssl.enabled.protocols",
    "ssl.provider": _OPENSSL,
    "ssl.engine.factory.class": _OPENSSL,
    "ssl.keymanager.algorithm": _OPENSSL,
    "ssl.trustmanager.algorithm": _OPENSSL,
    "ssl.secure.random.implementation": _OPENSSL,
    "security.providers": _OPENSSL,
    "metric.reporters": _METRICS,
    "metrics.num.samples": _METRICS,
    "metrics.recording.level": _METRICS,
    "metrics.sample.window.ms": _METRICS,
    "auto.include.jmx.reporter": _METRICS,
    "sasl.kerberos.": _GSSAPI,
    "sasl.oauthbearer.": _TOKEN,
    "sasl.client.callback.handler.class": _LOGIN,
    "sasl.login.": _LOGIN,
    "config.providers": "give the values themselves; leave it out",
    "transaction.two.phase.commit.enable": "leave it out; see prepare_transaction()",
    "default.api.timeout.ms": "it is for AdminClient; see request.timeout.ms",
    "check.crcs": "records are always checked; leave it out",
    "client.rack": "records are read from leaders; leave it out",
    "exclude.internal.topics": "no pattern matches an internal topic; leave it out",
}


def advice_for(key: str) -> str | None:
    """Return advice for a setting that only Java clients have; None for all others."""
    if advice := _ADVICE.get(key):
        return advice
    prefixes = (name for name in _ADVICE if name.endswith(".") and key.startswith(name))
    return next((_ADVICE[name] for name in prefixes), None)
