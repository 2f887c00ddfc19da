"""Read the users that a sasl.jaas.config names for PLAIN.

    org.apache.kafka.common.security.plain.PlainLoginModule required
        username="admin" password="secret" user_admin="secret" user_alice="other";

The users are those of the options user_NAME: admin and alice.

Source: JAAS login configuration files; Kafka's PlainServerCallbackHandler.
"""

from __future__ import annotations

import re
from typing import Final

from mpbroker.base.config_def import ConfigError

_MODULE: Final = "org.apache.kafka.common.security.plain.PlainLoginModule"
_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<word>[^\s=;"']+)"""
    r"""|(?P<sign>[=;]))""",
    re.DOTALL,
)
_USER: Final = "user_"


def users_of_jaas(text: str, key: str) -> dict[str, str]:
    """Return the passwords of a JAAS configuration, by user.

    Args:
        text: the configuration.
        key: the name of the setting, for errors.

    Raises:
        ConfigError: the configuration has another form. The message names ``key``, and
            contains no password.
    """
    tokens = _tokens(text, key)
    if [token for _, token in tokens[:2]] != [_MODULE, "required"]:
        raise ConfigError(f"{key}: it must begin {_MODULE} required")
    if not tokens or tokens[-1] != ("sign", ";"):
        raise ConfigError(f"{key}: it must end with a semicolon")
    options = tokens[2:-1]
    if len(options) % 3:
        raise ConfigError(f"{key}: options must be name=value, values in quotes")
    users = {}
    for first in range(0, len(options), 3):
        (_, name), (_, equals), (kind, value) = options[first : first + 3]
        if equals != "=" or kind == "sign":
            raise ConfigError(f"{key}: options must be name=value, values in quotes")
        if name.startswith(_USER):
            users[name.removeprefix(_USER)] = value
    return users


def _tokens(text: str, key: str) -> list[tuple[str, str]]:
    tokens = []
    position, text = 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ConfigError(f"{key}: a quotation mark is missing at byte {position}")
        position = match.end()
        kind = str(match.lastgroup)
        value = match[kind]
        if kind == "text":
            value = re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL)
        tokens.append((kind, value))
    return tokens
