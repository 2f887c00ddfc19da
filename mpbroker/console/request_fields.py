"""Read the fields of a request: texts and numbers, with bounds."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from mpbroker.console.page_server import HttpError

MAX_NAME: Final = 1024  # characters of a user, a password, a name of a topic or group


def text_of(given: Mapping[str, Any], name: str, default: str = "") -> str:
    """Return a request's field; raise HttpError if it is no text, or too long."""
    found = given.get(name, default)
    if not isinstance(found, str) or len(found) > MAX_NAME:
        raise HttpError(
            HTTPStatus.BAD_REQUEST,
            f"{name} is not a text of up to {MAX_NAME} characters",
        )
    return found


def number_of(given: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return a request's field as an int64; raise HttpError if it is no number."""
    found = given.get(name, default)
    try:
        number = int(str(found)[:24])
    except ValueError:
        number = 2**64
    if not -(2**63) <= number < 2**63:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} is not a number")
    return number
