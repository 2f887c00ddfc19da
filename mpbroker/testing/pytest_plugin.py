"""A pytest plug-in: a real broker for tests of code that talks to Kafka.

    def test_my_code(mpbroker_server):
        producer = MyProducer(mpbroker_server.bootstrap)

    @pytest.mark.mpbroker_topics("orders", "events:4")
    @pytest.mark.mpbroker_config({"message.max.bytes": 100})
    def test_with_topics_of_its_own(mpbroker_server): ...

`mpbroker_server` is a broker for one test, `mpbroker_session_server` one for all tests
of a worker process (pytest-xdist has several; each has its own). Either listens on a
free port of 127.0.0.1, keeps its files in a directory that is removed afterwards, and
leaves no process behind, even if pytest is killed: see `pytest_keeper`. The marker
`mpbroker_topics` works with both; a topic that the shared broker has already stays as
it is. `server.create_topic` creates topics at any time. If a test fails, the report
shows the end of its broker's log.

    @pytest.mark.mpbroker_topics("orders:12")
    def test_that_a_node_may_die(mpbroker_cluster):
        producer = MyProducer(mpbroker_cluster.bootstrap)
        mpbroker_cluster.nodes[0].kill()

`mpbroker_cluster` has three nodes, which share the marker's topics. It needs the extra
`cluster`, and PostgreSQL: a server that runs (`--mpbroker-database-url`), in which each
test has a database of its own, or one whose programs are installed.

While one test runs, the broker of the next one is started. So only two kinds of tests
wait for a start: the first one, and those that have settings of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final

import pluggy
import pytest

from mpbroker.testing.server import MpbrokerServer, environment, keeper, new_directory

if TYPE_CHECKING:
    from mpbroker.testing.cluster_fixture import Databases, MpbrokerCluster

_TOPIC: Final = re.compile(r"([^:]+)(?::([1-9][0-9]*))?")


def _import_client() -> None:
    """Import the modules that `MpbrokerServer.create_topic` needs."""
    for name in ("addresses", "admin.topic_admin", "cluster"):
        import_module(f"mpbroker.client.{name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --mpbroker-database-url, which names a PostgreSQL server."""
    parser.getgroup("mpbroker").addoption(
        "--mpbroker-database-url",
        metavar="URL",
        default=os.environ.get("MPBROKER_TEST_DATABASE_URL"),
        help="a database of a PostgreSQL server, as a user that may create databases:"
        " mpbroker_cluster makes a database there for each test, and drops it; the"
        " default is the variable MPBROKER_TEST_DATABASE_URL, or a server of its own",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the plug-in's markers, and end the clean-up process after the tests."""
    config.add_cleanup(keeper.close)
    config.addinivalue_line(
        "markers",
        "mpbroker_topics(*names): topics that mpbroker_server (or"
        " mpbroker_session_server, or mpbroker_cluster) has from the start;"
        ' "name" or "name:PARTITIONS"',
    )
    config.addinivalue_line(
        "markers",
        "mpbroker_config(settings): settings of mpbroker_server, or of each node of"
        " mpbroker_cluster",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Have the topics of a test's markers created on the shared broker, too."""
    names: list[str] = getattr(item, "fixturenames", [])
    if "mpbroker_session_server" in names:
        names.insert(0, "_mpbroker_session_markers")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pluggy.Result[pytest.TestReport], None]:
    """Add the end of the broker's log to the report of a failed test."""
    outcome = yield
    report = outcome.get_result()
    if not report.failed:
        return
    for name in ("mpbroker_server", "mpbroker_session_server"):
        server = getattr(item, "funcargs", {}).get(name)
        if isinstance(server, MpbrokerServer) and server.log_path.exists():
            report.sections.append((f"log of {name}", server.last_words()))
    cluster = getattr(item, "funcargs", {}).get("mpbroker_cluster")
    for number, node in enumerate(getattr(cluster, "nodes", ()), start=1):
        if node.log_path.exists():
            report.sections.append((f"log of node {number}", node.last_words()))


class _Spare:
    """The broker of the next test, started in advance."""

    def __init__(self) -> None:
        self._next: tuple[ExitStack, MpbrokerServer] | None = None

    def prepare(self) -> None:
        """Begin to start the next test's broker, unless that was begun already."""
        if self._next is None:
            with ExitStack() as stack:
                directory = stack.enter_context(new_directory())
                server = MpbrokerServer(directory, {}, wait=False)
                stack.callback(server.stop)
                self._next = stack.pop_all(), server

    @contextmanager
    def take(self, *, with_client: bool = False) -> Iterator[MpbrokerServer]:
        """Wait until the broker started in advance serves; yield it, then stop it.

        Args:
            with_client: whether to import the client while the broker starts, for the
                topics that are created next.
        """
        self.prepare()
        assert self._next is not None
        (stack, server), self._next = self._next, None
        with stack:
            if with_client:
                _import_client()
            server.wait_until_ready()
            yield server

    def close(self) -> None:
        """Stop the broker started in advance, if no test has taken it."""
        if self._next is not None:
            (stack, _), self._next = self._next, None
            stack.close()


def _server(
    config: Mapping[str, object], *, with_client: bool = False
) -> Iterator[MpbrokerServer]:
    with new_directory() as directory:
        server = MpbrokerServer(directory, config, wait=False)
        try:
            if with_client:
                _import_client()
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


def _create_marked_topics(
    request: pytest.FixtureRequest,
    server: MpbrokerServer | MpbrokerCluster,
    *,
    anew: bool = True,
) -> None:
    from mpbroker.protocol.error_code import ErrorCode
    from mpbroker.protocol.errors import ApiError

    for marker in request.node.iter_markers("mpbroker_topics"):
        for name in marker.args:
            found = _TOPIC.fullmatch(name) if isinstance(name, str) else None
            if found is None:
                raise pytest.UsageError(
                    f'mpbroker_topics({name!r}): a topic is "name" or "name:PARTITIONS"'
                )
            try:
                server.create_topic(found[1], int(found[2] or 1))
            except ApiError as error:
                if anew or error.error_code != ErrorCode.TOPIC_ALREADY_EXISTS:
                    raise


def _marked_settings(request: pytest.FixtureRequest) -> dict[str, object]:
    settings: dict[str, object] = {}
    for marker in reversed(list(request.node.iter_markers("mpbroker_config"))):
        if len(marker.args) != 1 or not isinstance(marker.args[0], Mapping):
            raise pytest.UsageError(
                "mpbroker_config takes one dict, of Kafka's settings by name"
            )
        settings |= marker.args[0]
    return settings


def _is_wanted_again(request: pytest.FixtureRequest) -> bool:
    """Whether a later test wants a broker with the usual settings."""
    items = request.session.items
    later = items[items.index(request.node) + 1 :] if request.node in items else []
    return any(
        "mpbroker_server" in getattr(item, "fixturenames", ())
        and item.get_closest_marker("mpbroker_config") is None
        for item in later
    )


@pytest.fixture(scope="session")
def _mpbroker_spare() -> Iterator[_Spare]:
    spare = _Spare()
    yield spare
    spare.close()


@pytest.fixture
def mpbroker_server(
    request: pytest.FixtureRequest, _mpbroker_spare: _Spare
) -> Iterator[MpbrokerServer]:
    """A Kafka-compatible broker for this test alone; see `MpbrokerServer`."""
    config = _marked_settings(request)
    with_client = request.node.get_closest_marker("mpbroker_topics") is not None
    taken = (
        contextmanager(_server)(config, with_client=with_client)
        if config
        else _mpbroker_spare.take(with_client=with_client)
    )
    with taken as server:
        _create_marked_topics(request, server)
        if _is_wanted_again(request):
            _mpbroker_spare.prepare()
        yield server


@pytest.fixture(scope="session")
def mpbroker_session_server() -> Iterator[MpbrokerServer]:
    """A Kafka-compatible broker for all tests of this process."""
    yield from _server({})


@pytest.fixture
def _mpbroker_session_markers(
    request: pytest.FixtureRequest, mpbroker_session_server: MpbrokerServer
) -> None:
    if _marked_settings(request) and "mpbroker_server" not in request.fixturenames:
        raise pytest.UsageError(
            "mpbroker_config is for mpbroker_server; mpbroker_session_server is shared"
        )
    _create_marked_topics(request, mpbroker_session_server, anew=False)


@pytest.fixture(scope="session")
def _mpbroker_databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    from mpbroker.testing.cluster_fixture import databases

    url = request.config.getoption("--mpbroker-database-url")
    with new_directory() as directory, databases(url, directory, keeper.tell) as made:
        yield made


@pytest.fixture
def mpbroker_cluster(
    request: pytest.FixtureRequest, _mpbroker_databases: Databases
) -> Iterator[MpbrokerCluster]:
    """Three nodes of a cluster for this test alone; see `MpbrokerCluster`."""
    from mpbroker.testing.cluster_fixture import NODES, MpbrokerCluster, init_cluster

    config = _marked_settings(request)
    with ExitStack() as stack:
        url = stack.enter_context(_mpbroker_databases.new())
        store = stack.enter_context(new_directory()).as_uri()
        init_cluster(url, store, environment())
        nodes = []
        for number in range(1, NODES + 1):
            settings = {
                "cluster.database.url": url,
                "diskless.storage.url": store,
                **config,
                "node.id": number,
            }
            directory = stack.enter_context(new_directory())
            node = MpbrokerServer(directory, settings, wait=False)
            stack.callback(node.stop)
            nodes.append(node)
        for node in nodes:
            node.wait_until_ready()
        cluster = MpbrokerCluster(nodes)
        _create_marked_topics(request, cluster)
        yield cluster
