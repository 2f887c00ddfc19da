"""TLS and SASL of the client core: real sockets, and a clock that tests move."""

import ssl

import pytest

from mpbroker.client.addresses import Address
from mpbroker.client.cluster import Cluster
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.client.errors import (
    AuthenticationError,
    BrokerUnavailableError,
    SaslAuthenticationError,
    SslAuthenticationError,
)
from mpbroker.client.settings import ADMIN_CONFIG, ClientSettings, parse_settings
from mpbroker.producer import Producer, RetriableError
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.sasl_authenticate import SaslAuthenticateResponse
from mpbroker.protocol.messages.sasl_handshake import SaslHandshakeResponse
from tests.client import certificates
from tests.client.fake_broker import MECHANISMS, FakeBroker
from tests.client.test_network_client import ANSWER, Rig

PASSWORDS = {"alice": "wonder,land=", "a=b,c": "x"}


@pytest.fixture
def server_context(tmp_path):
    def make(*, wants_certificate=False):
        identity = tmp_path / "broker.pem"
        identity.write_text(certificates.BROKER_KEY + certificates.BROKER)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity)
        context.load_verify_locations(cadata=certificates.AUTHORITY)
        if wants_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return make


@pytest.fixture
def make_broker():
    made = []

    def make(**options):
        broker = FakeBroker({"t": 1}, host="localhost", **options)
        made.append(broker)
        return broker

    yield make
    for broker in made:
        broker.close()


def cluster_for(broker, address=None, **settings):
    given = {
        "bootstrap_servers": str(address or broker.address),
        "ssl_truststore_certificates": certificates.AUTHORITY,
        **settings,
    }
    parsed = ClientSettings.of(parse_settings(ADMIN_CONFIG, given), 5)
    return Cluster(parsed.bootstrap, 5, parsed)


TRUSTING = {
    "security_protocol": "SSL",
    "ssl_truststore_certificates": certificates.AUTHORITY,
}
IDENTITY = {
    # On one line, as a continued line of a properties file makes it.
    "ssl_keystore_certificate_chain": certificates.CLIENT.replace("\n", " "),
    "ssl_keystore_key": certificates.CLIENT_KEY_ENCRYPTED.replace("\n", "\\n"),
    "ssl_key_password": "secret",
}


def sasl(user="alice", password=None, mechanism="SCRAM-SHA-256", protocol="PLAINTEXT"):
    return {
        "security_protocol": f"SASL_{protocol}",
        "sasl_mechanism": mechanism,
        "sasl_username": user,
        "sasl_password": PASSWORDS.get(user, "") if password is None else password,
    }


# -- TLS -------------------------------------------------------------------------------


def test_what_is_large_goes_both_ways_encrypted(make_broker, server_context):
    broker = make_broker(tls=server_context())
    values = [bytes([n]) * 900_000 for n in range(4)]
    with Producer(bootstrap_servers=str(broker.address), **TRUSTING) as producer:
        for value in values:
            producer.send("t", value).result(30)
    consumer = Consumer(
        bootstrap_servers=str(broker.address), auto_offset_reset="earliest", **TRUSTING
    )
    with consumer:
        consumer.assign([("t", 0)])
        found = []
        while len(found) < len(values):
            for records in consumer.poll(5000).values():
                found += [record.value for record in records]
    assert found == values


def test_a_broker_nobody_vouches_for_is_not_trusted(make_broker, server_context):
    broker = make_broker(tls=server_context())
    stranger = {"ssl_truststore_certificates": certificates.CLIENT}
    with (
        cluster_for(broker, security_protocol="SSL", **stranger) as cluster,
        pytest.raises(SslAuthenticationError, match=r"(?s)is not trusted.*truststore"),
    ):
        cluster.any_broker()


def test_a_certificate_is_for_the_name_that_was_dialled(make_broker, server_context):
    broker = make_broker(tls=server_context())
    other = Address("127.0.0.1", broker.address.port)
    with (
        cluster_for(broker, other, security_protocol="SSL") as cluster,
        pytest.raises(SslAuthenticationError, match=r"127\.0\.0\.1"),
    ):
        cluster.any_broker()
    any_name = {"ssl_endpoint_identification_algorithm": ""}
    with cluster_for(broker, other, security_protocol="SSL", **any_name) as cluster:
        assert cluster.any_broker().address == other


def test_a_broker_that_asks_who_we_are_is_shown(make_broker, server_context):
    broker = make_broker(tls=server_context(wants_certificate=True))
    with cluster_for(broker, security_protocol="SSL", **IDENTITY) as cluster:
        assert cluster.metadata([]).brokers
    with (
        cluster_for(broker, security_protocol="SSL") as cluster,
        pytest.raises(SslAuthenticationError, match=r"ssl\.keystore\.location"),
    ):
        cluster.any_broker()


def test_tls_where_none_is_spoken_is_said(make_broker):
    broker = make_broker()
    with (
        cluster_for(broker, security_protocol="SSL") as cluster,
        pytest.raises((SslAuthenticationError, BrokerUnavailableError), match="TLS"),
    ):
        cluster.any_broker()


def test_no_tls_where_it_is_spoken_is_said(make_broker, server_context):
    broker = make_broker(tls=server_context())
    with cluster_for(broker) as cluster, pytest.raises(BrokerUnavailableError):
        cluster.any_broker()


# -- SASL ------------------------------------------------------------------------------


@pytest.mark.parametrize("user", PASSWORDS)
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_who_knows_the_password_is_let_in(make_broker, mechanism, user):
    broker = make_broker(passwords=PASSWORDS)
    with cluster_for(broker, **sasl(user, mechanism=mechanism)) as cluster:
        assert cluster.metadata([]).brokers


def test_both_together(make_broker, server_context):
    broker = make_broker(tls=server_context(), passwords=PASSWORDS)
    with cluster_for(broker, **sasl(protocol="SSL")) as cluster:
        assert cluster.metadata([]).brokers


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_a_wrong_password_is_told_once_and_clearly(make_broker, mechanism):
    broker = make_broker(passwords=PASSWORDS)
    settings = sasl(password="wrong", mechanism=mechanism)
    with cluster_for(broker, **settings) as cluster:
        with pytest.raises(SaslAuthenticationError) as caught:
            cluster.any_broker()
        assert f"SASL {mechanism}: SASL_AUTHENTICATION_FAILED" in str(caught.value)
        assert "sasl.username (alice)" in str(caught.value)
        assert "wrong" not in str(caught.value)
    assert len(broker.seen(ApiKey.SASL_HANDSHAKE)) == 1


def test_a_mechanism_that_is_not_there_is_answered_with_those_that_are(make_broker):
    broker = make_broker(passwords=PASSWORDS)
    broker.answer_with(
        ApiKey.SASL_HANDSHAKE,
        lambda request: SaslHandshakeResponse(
            error_code=ErrorCode.UNSUPPORTED_SASL_MECHANISM, mechanisms=["GSSAPI"]
        ),
    )
    with (
        cluster_for(broker, **sasl()) as cluster,
        pytest.raises(SaslAuthenticationError, match="the broker offers only GSSAPI"),
    ):
        cluster.any_broker()


def test_tokens_come_from_a_function_or_a_file(make_broker, tmp_path):
    broker = make_broker(passwords=PASSWORDS)
    path = tmp_path / "token"
    path.write_text("good\n")
    bearer = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}
    for source in (
        {"sasl_oauthbearer_token_provider": lambda: "good"},
        {"sasl_oauthbearer_token_endpoint_url": path.as_uri()},
    ):
        with cluster_for(broker, **bearer, **source) as cluster:
            assert cluster.metadata([]).brokers

    def fail():
        raise RuntimeError("the issuer is down")

    for source, words in ((lambda: "bad", "invalid_token"), (fail, "issuer is down")):
        given = {"sasl_oauthbearer_token_provider": source}
        with (
            cluster_for(broker, **bearer, **given) as cluster,
            pytest.raises(SaslAuthenticationError, match=words),
        ):
            cluster.any_broker()


def test_a_producer_with_a_wrong_password_says_so_and_does_not_hurry(make_broker):
    broker = make_broker(passwords=PASSWORDS)
    with Producer(
        bootstrap_servers=str(broker.address),
        reconnect_backoff_ms=3_600_000,
        reconnect_backoff_max_ms=3_600_000,
        **sasl(password="wrong"),
    ) as producer:
        for _ in range(3):
            error = producer.send("t", b"x").exception(30)
            assert isinstance(error, RetriableError)
            assert "SASL_AUTHENTICATION_FAILED" in str(error)
        with pytest.raises(RetriableError, match="SASL_AUTHENTICATION_FAILED"):
            producer.partitions_for("t")
    assert len(broker.seen(ApiKey.SASL_HANDSHAKE)) == 1


def test_a_consumer_with_a_wrong_password_says_so(make_broker):
    broker = make_broker(passwords=PASSWORDS)
    with Consumer(
        bootstrap_servers=str(broker.address), **sasl(password="wrong")
    ) as consumer:
        consumer.assign([("t", 0)])
        with pytest.raises(AuthenticationError, match=r"sasl\.password"):
            consumer.poll(1000)


# -- sessions that end -----------------------------------------------------------------


def secured_rig(lifetime_ms):
    parsed = parse_settings(
        ADMIN_CONFIG, {"bootstrap.servers": "boot", **sasl(mechanism="PLAIN")}
    )
    security = ClientSettings.of(parsed, 5).security
    rig = Rig(connect=False, security=security)
    rig.lifetime_ms = lifetime_ms
    while not rig.client.is_ready(0, rig.wire.now_ms):
        prove(rig)
        rig.client.ready(0, rig.wire.now_ms)
    return rig


def prove(rig, code=0):
    """Answer what is asked of SASL."""
    wire = rig.wire
    for sent in wire.waiting(ApiKey.SASL_HANDSHAKE):
        wire.answer(
            SaslHandshakeResponse(error_code=0, mechanisms=list(MECHANISMS)), sent
        )
    for sent in wire.waiting(ApiKey.SASL_AUTHENTICATE):
        wire.answer(
            SaslAuthenticateResponse(
                error_code=code,
                error_message=None,
                auth_bytes=b"",
                session_lifetime_ms=rig.lifetime_ms,
            ),
            sent,
        )
    rig.turns()


def test_before_a_session_ends_it_is_renewed_on_the_same_connection():
    rig = secured_rig(lifetime_ms=10_000)
    connects = len(rig.wire.connects)
    rig.wire.now_ms += 8_000
    rig.turns()
    assert not rig.wire.waiting(ApiKey.SASL_HANDSHAKE)
    rig.send()  # is answered first
    rig.wire.now_ms += 1_900
    assert not rig.client.is_ready(0, rig.wire.now_ms)  # even before it is begun
    rig.turns()
    assert rig.wire.waiting(ApiKey.SASL_HANDSHAKE, 0)
    assert not rig.client.is_ready(0, rig.wire.now_ms)  # nothing may come between
    rig.wire.answer(ANSWER, rig.wire.waiting(ApiKey.INIT_PRODUCER_ID)[0])
    rig.turns()
    assert len(rig.answers) == 1
    prove(rig)
    prove(rig)
    assert rig.client.is_ready(0, rig.wire.now_ms)
    rig.wire.now_ms += 8_000
    rig.turns()
    assert rig.client.is_ready(0, rig.wire.now_ms)  # counted anew
    assert len(rig.wire.connects) == connects


def test_a_session_for_good_is_not_renewed():
    rig = secured_rig(lifetime_ms=0)
    rig.wire.now_ms += 10_000_000
    rig.turns()
    assert not rig.wire.waiting(ApiKey.SASL_HANDSHAKE)


def test_a_refused_login_is_tried_again_after_its_backoff():
    rig = secured_rig(lifetime_ms=10_000)
    rig.wire.now_ms += 9_900
    rig.turns()
    prove(rig)
    prove(rig, ErrorCode.SASL_AUTHENTICATION_FAILED)
    assert isinstance(rig.client.error_of(0), SaslAuthenticationError)
    assert isinstance(rig.metadata.refusal, SaslAuthenticationError)
    rig.turns(2)
    connects = len(rig.wire.connects)
    assert not rig.client.ready(0, rig.wire.now_ms)
    assert len(rig.wire.connects) == connects  # not at once
    rig.wire.now_ms += 60
    for _ in range(9):
        rig.client.ready(0, rig.wire.now_ms)
        prove(rig)
    assert len(rig.wire.connects) > connects
    assert rig.metadata.refusal is None
    assert rig.client.is_ready(0, rig.wire.now_ms)
