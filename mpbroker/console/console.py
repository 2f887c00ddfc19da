"""Console: answers the HTTP requests of the console's page.

A user logs in with a POST, which makes a session. All other paths need a session,
except the page's own files and the question whether there is one. A POST of a session
carries its CSRF token, so that no other page can make the browser send one. The broker
decides what a user may see and do.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from secrets import compare_digest
from typing import Any, Final

import orjson

from mpbroker.base.config_def import ConfigError
from mpbroker.base.errors import MpbrokerError
from mpbroker.client.admin.topic_admin import LATEST
from mpbroker.client.cluster import Cluster
from mpbroker.client.errors import (
    ApiError,
    AuthenticationError,
    BrokerUnavailableError,
    ErrorCode,
)
from mpbroker.console import (
    group_pages,
    message_pages,
    overview_page,
    rights_pages,
    topic_pages,
    transaction_pages,
)
from mpbroker.console.access import Access
from mpbroker.console.message_search import Searchers, search_messages
from mpbroker.console.page_server import HttpError, Request, Response
from mpbroker.console.request_fields import number_of, text_of
from mpbroker.console.rights_pages import RIGHTS_CHANGES
from mpbroker.console.schemas import Schemas
from mpbroker.console.sessions import (
    BusyError,
    Session,
    Sessions,
    cookie,
    cookie_name,
    token_of,
)
from mpbroker.console.transaction_pages import TRANSACTION_CHANGES
from mpbroker.console.user_changes import CHANGES
from mpbroker.inspect.overview_board import OverviewBoard

_JSON: Final = "application/json"
FILES: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/console.css": ("console.css", "text/css; charset=utf-8"),
    "/overview.js": ("overview.js", "text/javascript; charset=utf-8"),
    "/rights.js": ("rights.js", "text/javascript; charset=utf-8"),
    "/transactions.js": ("transactions.js", "text/javascript; charset=utf-8"),
    "/console.js": ("console.js", "text/javascript; charset=utf-8"),
}
_LOOPBACK: Final = re.compile(
    r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?", re.IGNORECASE | re.ASCII
)
# The number of logins at a time: each costs the broker a derived key.
_LOGINS: Final = 4
_LOGIN_S: Final = 15.0
_STATUS: Final = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: HTTPStatus.NOT_FOUND,
    ErrorCode.GROUP_ID_NOT_FOUND: HTTPStatus.NOT_FOUND,
    ErrorCode.SECURITY_DISABLED: HTTPStatus.CONFLICT,
}

_ALL_CHANGES: Final = {**CHANGES, **RIGHTS_CHANGES, **TRANSACTION_CHANGES}

# Returns a document for JSON, given a session and the fields of a query.
View = Callable[[Session, Mapping[str, str]], Any]


class Console:
    """Answers the HTTP requests of the console, the web pages for operators.

    Args:
        access: the broker's listener that the console connects to.
        board: the shared memory in which the exporter puts the overview: figures of
            the broker's processes, and their history.
        schemas: the schemas by which values are shown.
    """

    def __init__(self, access: Access, board: OverviewBoard, schemas: Schemas) -> None:
        self._access = access
        self._sessions = Sessions()
        self._logins = threading.BoundedSemaphore(_LOGINS)
        self._views: dict[str, View] = {
            "/api/overview": partial(overview_page.show_overview, board),
            "/api/history": partial(overview_page.show_history, board),
            "/api/topics": _listed(topic_pages.list_topics),
            "/api/topic": _with_client(_topic),
            "/api/groups": _listed(group_pages.list_groups),
            "/api/acls": _listed(rights_pages.list_acls),
            "/api/users": _listed(rights_pages.list_users),
            "/api/quotas": _listed(rights_pages.list_quotas),
            "/api/transactions": _listed(transaction_pages.list_transactions),
            "/api/producers": _with_client(transaction_pages.list_producers),
            "/api/directories": _with_client(transaction_pages.list_directories),
            "/api/group": _with_client(_group),
            "/api/configs": _with_client(_configs),
            "/api/messages": _with_client(partial(_messages, schemas)),
            "/api/search": _with_client(partial(_search, schemas, Searchers())),
        }

    def expire(self) -> None:
        """End the sessions whose time is over; to be called from time to time."""
        self._sessions.expire()

    def answer(self, request: Request) -> Response:
        """Answer one HTTP request of the console; any thread may call this.

        Raises:
            HttpError: the request is refused.
        """
        self._check_origin(request)
        if request.method == "GET" and request.path in FILES:
            name, content_type = FILES[request.path]
            body = files("mpbroker.console").joinpath(name).read_bytes()
            return Response(HTTPStatus.OK, content_type, body)
        token = token_of(request.headers)
        session = self._sessions.find(token)
        if request.path == "/api/session" and request.method == "GET":
            return _json(self._told(session))
        if request.path == "/api/login" and request.method == "POST":
            return self._log_in(request, token)
        if session is None:
            raise HttpError(HTTPStatus.UNAUTHORIZED, "log in first")
        if request.method == "GET":
            return self._view(session, request)
        given = request.headers.get("x-csrf-token", "")
        if not compare_digest(given.encode(), session.csrf.encode()):
            raise HttpError(HTTPStatus.FORBIDDEN, "the page is out of date; reload it")
        if request.path == "/api/logout":
            self._sessions.end(token)
            answer = _json({})
            return answer._replace(headers=(_cookie(request, ""),))
        change = _ALL_CHANGES.get(request.path)
        if change is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "there is no such path")
        document = _document(request)

        def make() -> Any:
            with session.client() as cluster:
                return change(cluster, document)

        return _json(_asked(make))

    def _check_origin(self, request: Request) -> None:
        """Refuse requests of other sites' pages, and foreign names (DNS rebinding).

        Raises:
            HttpError: the request does not come from the console's own page.
        """
        host = request.headers.get("host", "")
        if not self._access.needs_login and not _LOOPBACK.fullmatch(host):
            raise HttpError(
                HTTPStatus.MISDIRECTED_REQUEST,
                "without a login, the console is served as localhost only",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise HttpError(HTTPStatus.FORBIDDEN, "another site sent this request")

    def _told(self, session: Session | None) -> dict[str, Any]:
        return {
            "needs_login": self._access.needs_login,
            "user": session.user if session is not None else None,
            "csrf": session.csrf if session is not None else None,
        }

    def _log_in(self, request: Request, before: str) -> Response:
        user = password = ""
        # Read also if there is no login: JSON cannot come from another site's form.
        document = _document(request)
        if self._access.needs_login:
            user = text_of(document, "user")
            password = text_of(document, "password")
            if not user or not password:
                raise HttpError(HTTPStatus.BAD_REQUEST, "give a user and a password")
        if not self._logins.acquire(timeout=_LOGIN_S):
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "too many users log in now")
        try:
            settings, cluster = _asked(
                partial(self._access.log_in, user, password), HTTPStatus.FORBIDDEN
            )
        finally:
            self._logins.release()
        self._sessions.end(before)
        token, session = self._sessions.open(user, settings, cluster)
        return _json(self._told(session))._replace(headers=(_cookie(request, token),))

    def _view(self, session: Session, request: Request) -> Response:
        view = self._views.get(request.path)
        if view is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "there is no such path")
        return _json(_asked(partial(view, session, request.query)))


def _cookie(request: Request, token: str) -> tuple[str, str]:
    name = cookie_name(request.headers.get("host", ""))
    return cookie(name, token, is_secure=_is_secure(request))


def _is_secure(request: Request) -> bool:
    """Return whether the browser speaks TLS, to the console or to a proxy before it."""
    if request.is_secure:
        return True
    return request.headers.get("x-forwarded-proto", "").lower() == "https"


def _json(document: Any) -> Response:
    body = orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS)
    return Response(HTTPStatus.OK, _JSON, body)


def _document(request: Request) -> Mapping[str, Any]:
    """Return the JSON object in a request's body."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != _JSON:
        raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send {_JSON}")
    try:
        found = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise HttpError(HTTPStatus.BAD_REQUEST, "send a JSON object")
    return found


def _asked(
    ask: Callable[[], Any], refused: HTTPStatus = HTTPStatus.UNAUTHORIZED
) -> Any:
    """Call ``ask`` and return its result; raise HttpError if the broker refuses.

    Args:
        ask: sends requests to the broker.
        refused: the HTTP status for a user or password that the broker refuses.
    """
    try:
        return ask()
    except ApiError as error:
        code = error.error_code
        status = _STATUS.get(code, HTTPStatus.BAD_REQUEST)
        if code.name.endswith("AUTHORIZATION_FAILED"):
            status = HTTPStatus.FORBIDDEN
        raise HttpError(status, str(error)) from error
    except AuthenticationError as error:
        raise HttpError(refused, str(error)) from error
    except (BrokerUnavailableError, BusyError) as error:
        raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
    except ConfigError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from error
    except MpbrokerError as error:
        raise HttpError(HTTPStatus.BAD_GATEWAY, str(error)) from error


# -- views -----------------------------------------------------------------------------


def _start_of(given: Mapping[str, Any]) -> int:
    return max(0, number_of(given, "start"))


def _with_client(view: Callable[[Cluster, Mapping[str, str]], Any]) -> View:
    def ask(session: Session, query: Mapping[str, str]) -> Any:
        with session.client() as cluster:
            return view(cluster, query)

    return ask


def _listed(view: Callable[..., Any]) -> View:
    """Make a function that answers an HTTP request with a page of a list.

    It takes the text to search for, and the first row, from the request's query string.
    """

    def ask(session: Session, query: Mapping[str, str]) -> Any:
        match, is_fresh = text_of(query, "match"), query.get("fresh") == "1"
        return view(session, match, _start_of(query), is_fresh=is_fresh)

    return ask


def _group(cluster: Cluster, query: Mapping[str, str]) -> Any:
    return group_pages.describe_group(cluster, text_of(query, "id"))


def _topic(cluster: Cluster, query: Mapping[str, str]) -> Any:
    return topic_pages.describe_topic(cluster, text_of(query, "name"), _start_of(query))


def _configs(cluster: Cluster, query: Mapping[str, str]) -> Any:
    return topic_pages.describe_configs(cluster, text_of(query, "name"))


def _look_of(schemas: Schemas, query: Mapping[str, str]) -> message_pages.Look:
    form = query.get("format", "auto")
    if form not in message_pages.FORMATS:
        form = "auto"
    # Without a registry only those who ask for it are told that there is none.
    wants_schemas = form == "registry" or (form == "auto" and schemas.has_registry)
    return message_pages.Look(form, schemas.decoder() if wants_schemas else None)


def _messages(schemas: Schemas, cluster: Cluster, query: Mapping[str, str]) -> Any:
    """Return ``count`` records of a partition, for the query of a request.

    They begin at the offset or the time (ms since 1970) in the query string; without
    both, they are the last ones.
    """
    partition = message_pages.partition_of(
        cluster, text_of(query, "topic"), number_of(query, "partition")
    )
    count = number_of(query, "count", 50)
    if "time" in query:
        offset = partition.offset_at(cluster, max(0, number_of(query, "time")))
    elif "offset" in query:
        offset = number_of(query, "offset")
    else:
        offset = partition.offset_at(cluster, LATEST) - count
    return message_pages.read_messages(
        cluster, partition, offset, count, _look_of(schemas, query)
    )


def _search(
    schemas: Schemas,
    searchers: Searchers,
    cluster: Cluster,
    query: Mapping[str, str],
) -> Any:
    """Search a partition for a text from an offset on.

    If the query's partition is -1, it is the one where Kafka's clients write records
    with the text as their key.
    """
    text = text_of(query, "text")
    partition = message_pages.partition_of(
        cluster, text_of(query, "topic"), number_of(query, "partition"), text
    )
    search = partial(
        search_messages,
        cluster,
        partition,
        number_of(query, "offset"),
        text,
        query.get("in", "any"),
        _look_of(schemas, query),
    )
    return searchers.run(search)
