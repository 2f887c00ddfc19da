"""Through TLS, as a user with a password: reading, streaming, writing, exactly once."""

from __future__ import annotations

import pytest

from tests.client import certificates
from tests.support.broker import Broker
from tests.support.fetch_clients import have_spark_connector

pytestmark = pytest.mark.timeout(900)

USER, PASSWORD = "alice", "wonder,land="


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    directory = tmp_path_factory.mktemp("secured")
    identity = directory / "broker.pem"
    identity.write_text(certificates.BROKER_KEY + certificates.BROKER)
    (directory / "users").write_text(f"{USER}:{PASSWORD}\n")
    broker = Broker(
        directory / "data",
        {
            "listeners": "SASL_SSL://127.0.0.1:0",
            "num.network.threads": 1,
            "num.io.threads": 1,
            "auto.create.topics.enable": "true",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": identity,
            "sasl.enabled.mechanisms": "PLAIN",
            "sasl.plain.users.file": directory / "users",
        },
    )
    with broker:
        yield broker


@pytest.fixture
def options(secured):
    return {
        "kafka.bootstrap.servers": secured.bootstrap,
        "kafka.security.protocol": "SASL_SSL",
        "kafka.ssl.truststore.certificates": certificates.AUTHORITY,
        # The certificate is for localhost; clients are sent to 127.0.0.1.
        "kafka.ssl.endpoint.identification.algorithm": "",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": USER,
        "kafka.sasl.password": PASSWORD,
    }


def test_rows_go_in_through_a_stream_and_out_again_encrypted(
    spark, options, finish, topic_name, tmp_path
):
    copy = f"{topic_name}-copy"
    spark.range(500).selectExpr("string(id) AS value").write.format("mpbroker").mode(
        "append"
    ).options(**options, topic=topic_name).save()
    stream = spark.readStream.format("mpbroker").options(**options)
    writer = (
        stream.option("subscribe", topic_name)
        .option("startingOffsets", "earliest")
        .load()
        .select("value")
        .writeStream.format("mpbroker")
        .options(**options, topic=copy, exactlyOnce="true")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
    )
    finish(writer.start)
    rows = (
        spark.read.format("mpbroker")
        .options(**options)
        .option("subscribe", copy)
        .option("kafka.isolation.level", "read_committed")
        .load()
        .selectExpr("int(string(value)) AS number")
        .collect()
    )
    assert sorted(row.number for row in rows) == list(range(500))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kafka.sasl.password": "wrong"}, "SASL_AUTHENTICATION_FAILED|PLAIN"),
        ({"kafka.ssl.truststore.certificates": certificates.CLIENT}, "certificate"),
    ],
)
def test_a_wrong_password_or_authority_is_an_error_that_says_so(
    spark, options, topic_name, change, message
):
    reader = spark.read.format("mpbroker").options(**options | change)
    with pytest.raises(Exception, match=message):
        reader.option("subscribe", topic_name).load().collect()


@pytest.mark.skipif(not have_spark_connector(), reason="no connector of Spark's own")
def test_sparks_own_connector_reads_the_same_with_the_same_options(
    spark, options, topic_name
):
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    common = {name: options[name] for name in options if "word" not in name}
    del common["kafka.sasl.username"]
    common["kafka.ssl.truststore.type"] = "PEM"
    common["kafka.sasl.jaas.config"] = (
        f'{module} required username="{USER}" password="{PASSWORD}";'
    )
    rows = spark.range(50).selectExpr("string(id) AS value")
    writer = rows.write.format("mpbroker").mode("append")
    writer.options(**common, topic=topic_name).save()
    ours, theirs = (
        sorted(
            spark.read.format(each)
            .options(**common, subscribe=topic_name)
            .load()
            .collect()
        )
        for each in ("mpbroker", "kafka")
    )
    assert len(ours) == 50
    assert ours == theirs
