"""A broker with a console for tests, and a client of the console over HTTP."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from tests.exporter.asking import told, wait_until
from tests.support.broker import Broker

PASSWORD = "a pässword"
USERS = ("admin", "alice", "<img src=x onerror=alert(1)>")
CONSOLE = {"console.listeners": "HTTP://127.0.0.1:0"}


def secured(directory: Path, settings: Mapping[str, object] = CONSOLE) -> Broker:
    """A broker with PLAIN's users and ACLs; `admin` may do everything."""
    users = directory / "users"
    users.write_text("".join(f"{user}:{PASSWORD}\n" for user in USERS))
    return Broker(
        directory / "data",
        {
            **settings,
            "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "sasl.plain.users.file": users,
            "authorizer.class.name": (
                "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
            ),
            "super.users": "User:admin;User:ANONYMOUS",
        },
    )


def url_of(broker: Broker) -> str:
    return str(told(broker)["console"])


class Answer:
    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.status = status
        self.body = body
        self.headers = headers

    @property
    def json(self) -> Any:
        assert self.status == 200, self.body
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


class Browser:
    """Asks the console as its page does, with cookie and token.

    Args:
        context: of TLS, if the console has it.
    """

    def __init__(self, url: str, context: ssl.SSLContext | None = None) -> None:
        self.context = context
        self.address = urlsplit(url).netloc
        self.cookie = ""
        self.csrf = ""

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> Answer:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        if self.context is not None:
            connection = http.client.HTTPSConnection(
                self.address, timeout=60, context=self.context
            )
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookie:
            sent.setdefault("Cookie", self.cookie)
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, answer.read(), found)
        finally:
            connection.close()

    def get(self, path: str, **fields: object) -> Answer:
        return self.ask("GET", f"/api/{path}?{urlencode(fields)}")

    def post(self, path: str, document: object, **headers: str) -> Answer:
        sent = {"Content_Type": "application/json", "X_CSRF_Token": self.csrf}
        body = json.dumps(document).encode()
        return self.ask("POST", f"/api/{path}", body, **(sent | headers))

    def log_in(self, user: str = "", password: str = PASSWORD) -> Answer:
        answer = self.post("login", {"user": user, "password": password})
        if answer.status == 200:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
            self.csrf = answer.json["csrf"]
        return answer


def browser(broker: Broker, user: str | None = None) -> Browser:
    """A browser at the console, which listens a moment after the broker; logged in."""
    made = Browser(url_of(broker))
    wait_until(lambda: made.get("session").status == 200)
    if user is not None:
        assert made.log_in(user).status == 200
    return made
