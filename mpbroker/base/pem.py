r"""Put PEM that stands in a setting into the form that OpenSSL reads; say what it has.

A properties file joins the lines of a value by blanks, and other sources write a line's
end as \n. Kafka takes any white space between the markers and in the base64; OpenSSL
wants a marker on a line of its own, and lines of 64 characters.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
from collections.abc import Iterator
from typing import Final, NamedTuple

from mpbroker.base.config_def import ConfigError

_BLOCK: Final = re.compile(
    r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL
)
_LINE: Final = 64
_BEGIN: Final = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]*={0,2}")

KEY: Final = "PRIVATE KEY"
CERTIFICATE: Final = "CERTIFICATE"


def pem_of(text: str) -> str:
    """Return the blocks of a PEM text, each marker and each 64 characters on a line.

    What is between the blocks is left out. A text without a block is returned as it is,
    for OpenSSL to refuse.
    """
    blocks = _BLOCK.findall(_unescaped(text))
    return "".join(map(_block, blocks)) if blocks else text + "\n"


def _block(block: tuple[str, str]) -> str:
    label, body = block
    if ":" in body:  # an old key's headers, whose lines must stay: Proc-Type, DEK-Info
        lines = [line.strip() for line in body.strip().splitlines()]
    else:
        base64 = "".join(body.split())
        lines = [base64[at : at + _LINE] for at in range(0, len(base64), _LINE)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""])


def _unescaped(text: str) -> str:
    return text.replace("\\r", "").replace("\\n", "\n")


def has_block(text: str, wanted: str) -> bool:
    """Return whether a text has a whole block of a kind.

    Args:
        text: the text, as in `pem_of`.
        wanted: KEY or CERTIFICATE, which stand for the other kinds of keys and
            certificates, too ("RSA PRIVATE KEY", "TRUSTED CERTIFICATE").
    """
    return any(label.endswith(wanted) for label, _ in _BLOCK.findall(_unescaped(text)))


def found_in(text: str) -> str:
    """Say what a text has that should be PEM, without repeating a part of a key."""
    text = _unescaped(text).strip()
    blocks = _BLOCK.findall(text)
    for label, body in blocks:
        fault = _fault_of(body)
        if fault:
            return f"found a block {label} {fault}"
    begun = len(_BEGIN.findall(text))
    if begun > len(blocks):
        label = _BEGIN.findall(text)[-1]
        return (
            f"found -----BEGIN {label}----- without -----END {label}-----, so it is"
            " cut off"
        )
    if blocks:
        labels = [label for label, _ in blocks]
        counts = (f"{labels.count(each)} {each}" for each in dict.fromkeys(labels))
        return f"found {' and '.join(counts)}"
    if not text:
        return "found nothing"
    if text.startswith(("/", "./", "../", "~")) and len(text.split()) == 1:
        return "found what may be the path of a file"
    if _BASE64.fullmatch("".join(text.split())):
        return f"found {len(text)} characters of base64 without markers"
    return f"found {len(text)} characters without a line -----BEGIN ...-----"


def _fault_of(body: str) -> str:
    """Say what is wrong with the base64 of a block; "": nothing."""
    if ":" in body:  # an old key's headers stand in front of it
        return ""
    base64 = "".join(body.split())
    if not base64:
        return "with nothing in it"
    if not _BASE64.fullmatch(base64):
        return "with characters that are not base64"
    if len(base64) % 4:
        return f"of {len(base64)} characters, not a multiple of 4: some are missing"
    return ""


def _shape_of(wanted: str, *, is_text: bool) -> str:
    """Say how PEM looks that has a block of a kind."""
    shape = f"it must have -----BEGIN {wanted}-----, base64, and -----END {wanted}-----"
    if is_text:
        shape += (
            r"; its lines are joined by \n, by blanks, or by a backslash at the end of"
            " each line of a properties file"
        )
    return shape


# -- loading ---------------------------------------------------------------------------


class Identity(NamedTuple):
    """Holds a private key and its certificates, and the settings they are from.

    Attributes:
        key_name: the setting as it was given; with its value, if that is a path.
        key: PEM with the private key.
        chain_name: likewise.
        chain: PEM with the certificates, that of the key first.
        is_text: whether both stand in settings, and not in one file.
    """

    key_name: str
    key: str
    chain_name: str
    chain: str
    is_text: bool


def load_identity(
    context: ssl.SSLContext, identity: Identity, password: str | None
) -> None:
    """Load a private key and its certificates.

    Args:
        context: gets them.
        identity: the key and the certificates.
        password: of the private key; None: not set.

    Raises:
        ConfigError: they cannot be used. The text names the setting, what was found in
            it, and how it should look, but nothing of the key.
    """
    key_name, key, chain_name, chain, is_text = identity
    if not key or not chain:
        given, lacks = (key_name, chain_name) if key else (chain_name, key_name)
        raise ConfigError(f"{given} is set, and {lacks} is not: set both")
    for name, text, wanted in ((key_name, key, KEY), (chain_name, chain, CERTIFICATE)):
        if not has_block(text, wanted):
            raise ConfigError(
                f"{name}: there is no {wanted.lower()} in it: {found_in(text)};"
                f" {_shape_of(wanted, is_text=is_text)}"
            )

    def given_password() -> str:
        if password is None:
            raise ConfigError(
                f"{key_name}: the private key is encrypted: set ssl.key.password"
            )
        return password

    data = pem_of(key) + pem_of(chain) if is_text else key
    try:
        with _as_file(data.encode()) as path:
            context.load_cert_chain(path, password=given_password)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(_unusable(identity, reason)) from None


def _unusable(identity: Identity, reason: str) -> str:
    key_name, key, chain_name, chain, is_text = identity
    name, text, wanted = key_name, key, KEY
    if not _are_certificates(pem_of(chain) if is_text else chain):
        name, text, wanted = chain_name, chain, CERTIFICATE
    elif reason == "KEY_VALUES_MISMATCH" and is_text:
        name = f"{key_name} and {chain_name}"
    remedy = _REMEDIES.get(reason)
    if remedy is None:
        remedy = f"{found_in(text)}; {_shape_of(wanted, is_text=is_text)}"
    return f"{name}: the {wanted.lower()} cannot be used ({in_words(reason)}); {remedy}"


_REMEDIES: Final = {
    "KEY_VALUES_MISMATCH": "the private key is not that of the first certificate: give"
    " both of one pair, its certificate before those of authorities",
    "BAD_DECRYPT": "ssl.key.password is not that of the private key",
    "EE_KEY_TOO_SMALL": "make a key of 2048 bits or more",
}


def _are_certificates(text: str) -> bool:
    """Return whether OpenSSL can read the certificates of a PEM text."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        return False
    return True


def load_trust(
    context: ssl.SSLContext,
    name: str,
    text: str,
    *,
    is_text: bool,
    path: str | None = None,
) -> None:
    """Load trusted certificates.

    Args:
        context: gets them.
        name: the setting as it was given; with its value, if that is a path.
        text: PEM with the certificates.
        is_text: whether it stands in the setting, and not in a file.
        path: the file, for OpenSSL to read; None: it gets the text.

    Raises:
        ConfigError: no certificates can be read. The text is as for `load_identity`.
    """
    try:
        if path is not None:
            context.load_verify_locations(path)
        else:
            context.load_verify_locations(cadata=pem_of(text) if is_text else text)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"{name}: no certificates can be read from it ({in_words(reason)});"
            f" {found_in(text)}; {_shape_of(CERTIFICATE, is_text=is_text)}"
        ) from None


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Give the path of a file in memory with ``data``, until the block ends.

    OpenSSL reads keys only from files.
    """
    fd = os.memfd_create("mpbroker-key", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def in_words(reason: str) -> str:
    """Return OpenSSL's name of a reason as words."""
    return reason.replace("_", " ").lower()
