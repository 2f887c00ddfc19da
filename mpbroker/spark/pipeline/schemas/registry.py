"""Ask a schema registry, by the REST interface that Confluent's registry has.

Three kinds of GET are all that a reader of records needs, so urllib does them: the
client of confluent-kafka would bring twelve packages to each executor, and gives up
where a pipeline has to wait.
"""

from __future__ import annotations

import base64
import functools
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import orjson

from mpbroker.spark.pipeline.errors import PipelineError

_TIMEOUT_S: Final = 10.0
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0
_ACCEPT: Final = "application/vnd.schemaregistry.v1+json, application/json"


class UnknownSchemaError(ValueError):
    """The schema registry has no such schema, version or subject."""


class RegistryAwayError(PipelineError):
    """The schema registry does not answer, and the caller does not want to wait."""


@dataclass(frozen=True)
class Registered:
    """A schema that a schema registry has.

    Attributes:
        kind: AVRO, PROTOBUF or JSON.
        text: the schema; a file's descriptor in Base64 if it was asked for.
        references: the schemas that it names: the name in it, and the schema's text. A
            schema comes after those that it needs itself.
    """

    kind: str
    text: str
    references: tuple[tuple[str, str], ...] = ()


class SettingNames(NamedTuple):
    """The names of a registry's settings, for the texts of errors."""

    url: str = "value.registry"
    login: str = "value.registry_auth_env"
    ca: str = "value.registry_ca"


_NAMES: Final = SettingNames()  # those of a pipeline's file


@dataclass
class Registry:
    """Asks a schema registry for schemas, by id or by subject; remembers each schema.

    Attributes:
        urls: addresses of one registry; the first that answers is used.
        auth_env: an environment variable with "user:password"; empty: none.
        ca: a file of the authorities' certificates to trust; empty: the system's.
        say: a function that prints a line, when the registry is away and when it is
            back.
        waits: whether to wait for a registry that is away, without end.
        login: "user:password" itself, for callers without such a variable.
        timeout_s: seconds for each step of a request: the connection, each read.
        names: the names of the settings, for the texts of errors.
    """

    urls: tuple[str, ...]
    auth_env: str = ""
    ca: str = ""
    say: Callable[[str], None] = field(
        default=lambda text: print(f"mpbroker: {text}", file=sys.stderr, flush=True)
    )
    waits: bool = True
    sleep: Callable[[float], None] = time.sleep
    login: str = ""
    timeout_s: float = _TIMEOUT_S
    names: SettingNames = _NAMES
    _found: dict[tuple[str, bool], Registered] = field(default_factory=dict)

    def by_id(self, schema_id: int, *, serialized: bool = False) -> Registered:
        """Return the schema with an id from the schema registry.

        Args:
            serialized: whether to ask for Protobuf's descriptor instead of the text;
                not every registry has it.

        Raises:
            UnknownSchemaError: the registry has no such schema.
            PipelineError: the registry refuses to answer, or cannot give the descriptor
                of a schema that it has: so does Karapace if the schema names others.
        """
        return self._schema(f"/schemas/ids/{schema_id}", serialized)

    def versions(self, subject: str) -> list[int]:
        """Return the numbers of a subject's versions, ascending.

        Raises: see `by_id`.
        """
        return sorted(self._get(f"/subjects/{quote(subject, safe='')}/versions"))

    def version(
        self, subject: str, version: int, *, serialized: bool = False
    ) -> Registered:
        """Return the schema of a subject's version from the schema registry.

        Raises: see `by_id`.
        """
        path = f"/subjects/{quote(subject, safe='')}/versions/{version}"
        return self._schema(path, serialized)

    def _schema(self, path: str, serialized: bool) -> Registered:
        known = self._found.get((path, serialized))
        if known is not None:
            return known
        if serialized:
            answer = self._get(f"{path}?format=serialized", beside=path)
        else:
            answer = self._get(path)
        try:
            references: dict[str, str] = {}
            for each in answer.get("references") or ():
                inner = self.version(
                    each["subject"], each["version"], serialized=serialized
                )
                references |= dict(inner.references)
                references[each["name"]] = inner.text
            kind = answer.get("schemaType") or "AVRO"
            found = Registered(kind, answer["schema"], tuple(references.items()))
        except (KeyError, TypeError, AttributeError) as error:
            raise PipelineError(
                f"{self.urls[0]}{path} is no answer of a schema registry: {error!r}"
            ) from None
        self._found[path, serialized] = found
        return found

    def _get(self, path: str, beside: str = "") -> Any:
        """Return the schema registry's response to a GET; wait while it is away.

        Args:
            beside: another path, which a working registry answers. If it does, an error
                of ``path`` is final.

        Returns:
            The response's JSON, parsed.

        Raises:
            UnknownSchemaError, PipelineError: the registry refuses the request.
        """
        pause_s, was_away = _FIRST_PAUSE_S, False
        while True:
            for url in self.urls:
                try:
                    answer = self._ask(url + path)
                except (OSError, HTTPException, orjson.JSONDecodeError) as error:
                    reason = f"{url}: {getattr(error, 'reason', None) or error}"
                    if beside and self._fails_alone(error, url + beside):
                        raise PipelineError(f"{url}{path}: {error}") from None
                    continue
                if was_away:
                    self.say("the schema registry answers again")
                return answer
            if not self.waits:
                raise RegistryAwayError(
                    f"the schema registry does not answer ({reason})"
                )
            if not was_away:
                self.say(
                    f"the schema registry does not answer ({reason}); waiting for it,"
                    " nothing is lost"
                )
            was_away = True
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _fails_alone(self, error: Exception, beside: str) -> bool:
        """Return whether a server answered with an HTTP error, but serves ``beside``.

        Then the error concerns the one request, and waiting does not help.
        """
        if not isinstance(error, urllib.error.HTTPError):
            return False
        try:
            self._ask(beside)
        except (OSError, HTTPException, orjson.JSONDecodeError):
            return False
        return True

    def _ask(self, url: str) -> Any:
        """Send the schema registry a GET once; return the response's JSON, parsed.

        Raises:
            UnknownSchemaError, PipelineError: the registry refuses the request.
            OSError, HTTPException, JSONDecodeError: there is no response; another try,
                or another address, may have one.
        """
        request = urllib.request.Request(url, headers={"Accept": _ACCEPT})
        secret = self.login
        if self.auth_env:
            secret = os.environ.get(self.auth_env, "")
            if not secret:
                raise PipelineError(
                    f"{self.names.login}: there is no variable {self.auth_env!r}"
                    " in the environment; it must hold user:password"
                )
        if secret:
            token = base64.b64encode(secret.encode()).decode()
            request.add_header("Authorization", f"Basic {token}")
        try:
            with urllib.request.urlopen(
                request, timeout=self.timeout_s, context=self._tls(url)
            ) as response:
                return orjson.loads(response.read())
        except urllib.error.URLError as error:
            if not isinstance(error, urllib.error.HTTPError):
                if isinstance(error.reason, ssl.SSLCertVerificationError):
                    raise PipelineError(
                        f"the schema registry {url} has a certificate that is not"
                        f" trusted ({error.reason.verify_message}); see"
                        f" {self.names.ca}"
                    ) from None
                raise
            if error.code == 404:
                raise UnknownSchemaError(f"{url} does not exist") from None
            if error.code in (408, 429) or error.code >= 500:
                raise
            raise PipelineError(
                f"the schema registry refuses {url}: {error.code} {error.reason};"
                f" see {self.names.url} and {self.names.login}"
            ) from None

    def _tls(self, url: str) -> ssl.SSLContext | None:
        if not url.startswith("https:"):
            return None
        try:
            return ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:
            raise PipelineError(f"{self.names.ca}={self.ca!r}: {error}") from None


@functools.cache
def shared(urls: tuple[str, ...], auth_env: str, ca: str) -> Registry:
    """Return this process's only `Registry` for these settings, with its cache."""
    return Registry(urls, auth_env, ca)
