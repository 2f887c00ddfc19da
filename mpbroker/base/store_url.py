"""The URL of an object store, which may name the store's endpoint and region.

    s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME

One text says all about the place, so that a broker's helpers, commands and Spark get it
as one argument. Credentials are never part of it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

_STORE: Final = re.compile(r"(s3|s3a|gs|az|azure|abfss?|file)://.+")
_ENDPOINT: Final = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")
_REGION: Final = re.compile(r"[A-Za-z0-9._-]+")
_S3: Final = ("s3", "s3a")


class StoreUrl(NamedTuple):
    """The parts of a store's URL.

    Attributes:
        url: without the options, as messages show it.
        endpoint: URL of the server; "": the service's own, or the environment's.
        region: name of the region of S3; "": the environment's.
    """

    url: str
    endpoint: str = ""
    region: str = ""

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """Read a URL.

        Raises:
            ValueError: it is not the URL of a store, has credentials, or has an option
                that is unknown, wrong, or of no use for this kind of store.
        """
        if not _STORE.fullmatch(text):
            raise ValueError(
                "not a URL of a store; it must begin with s3://, gs://, az:// or"
                " file:///"
            )
        if text.startswith("file:"):  # where a "?" may be part of a name
            return cls(text)
        url, _, query = text.partition("?")
        if "@" in urlsplit(url).netloc and not url.startswith("abfs"):
            raise ValueError(
                "has a user or a password; credentials are taken from the environment"
            )
        options: dict[str, str] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in ("endpoint", "region"):
                raise ValueError(
                    f"has an option {name!r}; there are 'endpoint' and 'region'"
                )
            if name in options:
                raise ValueError(f"names its {name} twice; leave one out")
            options[name] = value
        found = cls(url, **options)
        found.check()
        return found

    def check(self) -> None:
        """Raise ValueError if an option is wrong, or of no use for this store."""
        if self.endpoint and self.scheme == "file":
            raise ValueError("a directory has no endpoint; leave it out")
        if self.endpoint and not _ENDPOINT.fullmatch(self.endpoint):
            raise ValueError(
                f"endpoint {self.endpoint!r} is not a server's URL, such as"
                " http://HOST:PORT"
            )
        if self.region and self.scheme not in _S3:
            raise ValueError(f"a store of {self.scheme}:// has no region; leave it out")
        if self.region and not _REGION.fullmatch(self.region):
            raise ValueError(
                f"region {self.region!r} is not a region's name, such as us-east-1"
            )

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        options = [
            f"{name}={quote(value, safe=':/')}"
            for name, value in (("endpoint", self.endpoint), ("region", self.region))
            if value
        ]
        return "?".join([self.url, "&".join(options)] if options else [self.url])
