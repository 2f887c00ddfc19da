"""Config providers: values that a setting takes from a file, a directory or a variable.

    config.providers=file
    config.providers.file.class=org.apache.kafka.common.config.provider.FileConfigProvider
    ssl.key.password=${file:/run/secrets/tls.properties:password}

``${PROVIDER:PATH:KEY}`` stands for a value that the provider has; ``${env:NAME}`` has
no path. Kafka's three providers are here under the names of their classes; other
classes of Java are refused. As in Kafka, ``${...}`` with a name that is no provider
stays as it is. If the provider does not have the value, Kafka keeps the text; here that
is an error, because ``${...}`` would become a password.

Source: KIP-297, KIP-421, KIP-632, KIP-887, KIP-993.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from mpbroker.base.config_def import ConfigError
from mpbroker.config.sources import Setting, parse_properties

PROVIDERS_KEY: Final = "config.providers"
_PREFIX: Final = f"{PROVIDERS_KEY}."
_PACKAGE: Final = "org.apache.kafka.common.config.provider."
_VARIABLE: Final = re.compile(r"\$\{([^}]*?):(?:([^}]*?):)?([^}]*?)\}")

# A function that returns the value for a path and a key.
_Provider = Callable[[str, str], str]


def with_provided_values(
    settings: Iterable[Setting], environ: Mapping[str, str]
) -> list[Setting]:
    """Replace each ${PROVIDER:PATH:KEY} by its value; leave out config.providers.*.

    config.providers itself stays: it is a key of the broker.

    Args:
        settings: the settings of all sources; of two that have the same name, the later
            one counts.

    Raises:
        ConfigError: a provider's class is not one of Kafka's three, or a provider does
            not have the value.
    """
    own: dict[str, Setting] = {}
    others: list[Setting] = []
    for setting in settings:
        if setting.name.startswith(_PREFIX):
            own[setting.name] = setting
            continue
        if setting.name == PROVIDERS_KEY:
            own[setting.name] = setting
        others.append(setting)
    providers = _providers(own, environ)
    if not providers:
        return others
    return [_provided(setting, providers) for setting in others]


def _provided(setting: Setting, providers: Mapping[str, _Provider]) -> Setting:
    def value(match: re.Match[str]) -> str:
        name, path, key = match.groups()
        if name not in providers:
            return match[0]
        try:
            return providers[name](path or "", key)
        except ConfigError as error:
            raise ConfigError(
                f"{setting.name}: {match[0]}: {error} ({setting.origin})"
            ) from None

    return setting._replace(text=_VARIABLE.sub(value, setting.text))


def _providers(
    own: Mapping[str, Setting], environ: Mapping[str, str]
) -> dict[str, _Provider]:
    names = own.get(PROVIDERS_KEY)
    providers = {}
    for name in names.text.split(",") if names else ():
        name = name.strip()
        if name:
            providers[name] = _provider(name, own, environ)
    return providers


def _provider(
    name: str, own: Mapping[str, Setting], environ: Mapping[str, str]
) -> _Provider:
    setting = own.get(f"{_PREFIX}{name}.class")
    if setting is None:
        raise ConfigError(
            f"{PROVIDERS_KEY} names {name}, and {_PREFIX}{name}.class is not set; it"
            f" must be {_PACKAGE}FileConfigProvider, DirectoryConfigProvider or"
            " EnvVarConfigProvider"
        )

    def parameter(of: str) -> str | None:
        found = own.get(f"{_PREFIX}{name}.param.{of}")
        return found.text.strip() if found is not None else None

    kind = setting.text.strip().removeprefix(_PACKAGE)
    if kind == "EnvVarConfigProvider":
        return _Variables(environ, parameter("allowlist.pattern"))
    paths = _AllowedPaths(parameter("allowed.paths"))
    if kind == "FileConfigProvider":
        return _Files(paths)
    if kind == "DirectoryConfigProvider":
        return _Directories(paths)
    raise ConfigError(
        f"{setting.name}={setting.text}: classes of Java are not loaded; of Kafka's"
        f" own, {_PACKAGE}FileConfigProvider, DirectoryConfigProvider and"
        f" EnvVarConfigProvider are here ({setting.origin})"
    )


class _Variables:
    """Gives values from environment variables."""

    def __init__(self, environ: Mapping[str, str], pattern: str | None) -> None:
        self._environ = environ
        try:
            self._pattern = re.compile(pattern) if pattern else None
        except re.error as error:
            raise ConfigError(f"allowlist.pattern={pattern}: {error}") from None

    def __call__(self, path: str, key: str) -> str:
        if path:
            raise ConfigError(f"a variable has no path; write ${{...:{key}}}")
        if self._pattern is not None and not self._pattern.fullmatch(key):
            raise ConfigError("allowlist.pattern does not match the variable")
        if key not in self._environ:
            raise ConfigError("the variable is not set")
        return self._environ[key]


class _AllowedPaths:
    """The places that a provider may read: all, unless allowed.paths names some."""

    def __init__(self, listed: str | None) -> None:
        self._roots = [
            Path(os.path.realpath(each.strip()))
            for each in (listed or "").split(",")
            if each.strip()
        ]

    def check(self, path: str) -> Path:
        """Return the real path of a path that the provider may read.

        Raises:
            ConfigError: the path is empty, or outside the allowed paths.
        """
        if not path:
            raise ConfigError("there is no path; write ${PROVIDER:PATH:KEY}")
        real = Path(os.path.realpath(path))
        if self._roots and not any(real.is_relative_to(root) for root in self._roots):
            raise ConfigError(f"{path} is not below one of allowed.paths")
        return real


class _Files:
    """Gives values from files in Java's properties format."""

    def __init__(self, paths: _AllowedPaths) -> None:
        self._paths = paths

    def __call__(self, path: str, key: str) -> str:
        text = _text_of(self._paths.check(path))
        for setting in parse_properties(text, path):
            if setting.name == key:
                return setting.text
        raise ConfigError(f"{path} has no key {key}")


class _Directories:
    """Gives values from directories with a file for each value, as in Kubernetes."""

    def __init__(self, paths: _AllowedPaths) -> None:
        self._paths = paths

    def __call__(self, path: str, key: str) -> str:
        if not key or "/" in key or key in (".", ".."):
            raise ConfigError(f"{key!r} is not the name of a file")
        return _text_of(self._paths.check(path) / key)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from None
