"""Make the principal of a client's certificate: its subject, shortened by rules.

Source: RFC 2253 (the form of Java's X500Principal); KIP-371 for the rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from mpbroker.base.config_def import ConfigError

_KEY: Final = "ssl.principal.mapping.rules"
# By OpenSSL's long names, as in getpeercert(). Attributes without a name in RFC 2253
# are written as a number and the bytes of their value, as Java does.
_SHORT: Final = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "STREET",
    "userId": "UID",
}
_NUMBERS: Final = {
    "emailAddress": ("1.2.840.113549.1.9.1", 0x16),  # IA5String
    "serialNumber": ("2.5.4.5", 0x13),  # PrintableString
    "dnQualifier": ("2.5.4.46", 0x13),
    "surname": ("2.5.4.4", 0x0C),  # UTF8String
    "givenName": ("2.5.4.42", 0x0C),
    "title": ("2.5.4.12", 0x0C),
}
_SPECIAL: Final = re.compile(r'([,+"\\<>;])')

Names = Sequence[Sequence[tuple[str, str]]]


def distinguished_name(subject: Names) -> str:
    """Return a certificate's subject as Kafka prints it: CN=client,OU=unit,O=org.

    Args:
        subject: from ssl.SSLSocket.getpeercert(), which begins with the outermost
            attribute, as O=org. The result ends with that one.
    """
    return ",".join("+".join(map(_attribute, names)) for names in reversed(subject))


def _attribute(name_and_value: tuple[str, str]) -> str:
    name, value = name_and_value
    if name in _SHORT:
        return f"{_SHORT[name]}={_escaped(value)}"
    if name in _NUMBERS:
        number, tag = _NUMBERS[name]
        data = value.encode()
        if len(data) < 128:
            return f"{number}=#{bytes((tag, len(data))).hex()}{data.hex()}"
    return f"{name}={_escaped(value)}"


def _escaped(value: str) -> str:
    value = _SPECIAL.sub(r"\\\1", value)
    if value[:1] in (" ", "#"):
        value = "\\" + value
    if len(value) > 1 and value.endswith(" "):
        value = value[:-1] + "\\ "
    return value


_RULE: Final = re.compile(
    r"\s*(?:(?P<default>DEFAULT)"
    r"|RULE:(?P<pattern>(?:\\.|[^\\/])*)/(?P<replacement>(?:\\.|[^\\/])*)/(?P<case>[LU]?))"
    r"\s*(?:,|$)"
)


class NoRuleError(ValueError):
    """No rule applies to a certificate's name, so the client has no principal."""


class PrincipalMapper:
    """Makes a user of a certificate's name by ssl.principal.mapping.rules.

    The first rule that matches the whole name decides.
    """

    def __init__(self, rules: str) -> None:
        """Parse the text of ssl.principal.mapping.rules.

        Raises:
            ConfigError: the rules do not have the form RULE:pattern/replacement/[LU] or
                DEFAULT, separated by commas.
        """
        self._rules: list[tuple[re.Pattern[str], str, str] | None] = []
        position, rules = 0, rules.strip() or "DEFAULT"
        while position < len(rules):
            match = _RULE.match(rules, position)
            if match is None:
                raise ConfigError(
                    f"{_KEY}={rules:.200}: {rules[position:]!r:.60} is neither DEFAULT"
                    " nor RULE:pattern/replacement/ with an L or U behind it"
                )
            position = match.end()
            self._rules.append(None if match["default"] else _parsed(match))

    def user(self, name: str) -> str:
        """Return the user of a distinguished name.

        DEFAULT returns the whole name.

        Raises:
            NoRuleError: no rule matches.
        """
        for rule in self._rules:
            if rule is None:
                return name
            pattern, replacement, case = rule
            match = pattern.fullmatch(name)
            if match is not None:
                user = match.expand(replacement)
                if case == "L":
                    return user.lower()
                return user.upper() if case == "U" else user
        raise NoRuleError(f"no rule of {_KEY} applies to {name}")


def _parsed(match: re.Match[str]) -> tuple[re.Pattern[str], str, str]:
    # Java writes groups $1, Python \1.
    replacement = re.sub(r"\\(.)|\$(\d)|\\$", _translated, match["replacement"])
    try:
        pattern = re.compile(match["pattern"])
        _check_groups(pattern, replacement)
    except (re.error, IndexError) as error:
        raise ConfigError(f"{_KEY}: {match[0].strip(', ')}: {error}") from None
    return pattern, replacement, match["case"]


def _translated(found: re.Match[str]) -> str:
    if found[2]:
        return f"\\g<{found[2]}>"
    return "\\\\" if found[1] in ("\\", None) else found[1]


def _check_groups(pattern: re.Pattern[str], replacement: str) -> None:
    for number in re.findall(r"\\g<(\d)>", replacement):
        if int(number) > pattern.groups:
            raise IndexError(f"there is no group ${number}")
