"""What the console changes, by a user with the right and by one without."""

from __future__ import annotations

import pytest

from mpbroker import (
    LATEST,
    AdminClient,
    ConfigResource,
    ConfigResourceType,
    Consumer,
    Producer,
    ShareConsumer,
)
from mpbroker.protocol.acl import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from tests.console.serving import browser, secured
from tests.exporter.asking import wait_until


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with secured(tmp_path_factory.mktemp("changes")) as made:
        with AdminClient(bootstrap_servers=made.bootstrap) as client:
            client.create_topic("flights", partitions=2)
            client.create_acls(
                [
                    AclBinding(
                        kind,
                        "*",
                        PatternType.LITERAL,
                        "User:alice",
                        "*",
                        AclOperation.DESCRIBE,
                        AclPermissionType.ALLOW,
                    )
                    for kind in (ResourceType.TOPIC, ResourceType.GROUP)
                ]
            )
        yield made


@pytest.fixture
def client(broker):
    with AdminClient(bootstrap_servers=broker.bootstrap) as made:
        yield made


@pytest.fixture
def admin(broker):
    return browser(broker, "admin")


@pytest.fixture
def alice(broker):
    return browser(broker, "alice")


CHANGES = {
    "topics/create": {"name": "new", "partitions": 3},
    "topics/delete": {"name": "flights"},
    "configs/set": {"topic": "flights", "key": "retention.ms", "value": "5"},
    "produce": {"topic": "flights", "partition": 0, "value": "v"},
    "groups/reset": {"group": "readers", "topic": "flights", "offsets": {"0": 0}},
    "groups/delete": {"group": "readers"},
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_user_without_the_right_changes_nothing(alice, client, path):
    client.alter_group_offsets("readers", {("flights", 0): 0})
    before = client.list_offsets({("flights", 0): LATEST})
    refused = alice.post(path, CHANGES[path])
    assert refused.status == 403
    assert "AUTHORIZATION_FAILED" in refused.text
    assert "flights" in {topic.name for topic in client.list_topics()}
    assert "new" not in {topic.name for topic in client.list_topics()}
    assert client.list_offsets({("flights", 0): LATEST}) == before
    assert client.list_group_offsets("readers") == {("flights", 0): 0}


@pytest.mark.parametrize("path", CHANGES)
def test_no_change_is_made_without_the_token(admin, path):
    assert admin.post(path, CHANGES[path], X_CSRF_Token="").status == 403


def test_a_topic_is_created_and_deleted(admin, client):
    made = {"name": "made", "partitions": 3, "configs": {"retention.ms": "1000"}}
    assert admin.post("topics/create", made).json == {"partitions": 3}
    assert len(client.describe_topic("made").partitions) == 3
    again = admin.post("topics/create", made)
    assert again.status == 400 and "TOPIC_ALREADY_EXISTS" in again.text
    assert admin.post("topics/delete", {"name": "made"}).json == {}
    wait_until(lambda: "made" not in {t.name for t in client.list_topics()})


def test_a_config_is_set_and_inherited_again(admin, client):
    retention = {"topic": "flights", "key": "retention.ms"}
    assert admin.post("configs/set", retention | {"value": "7000"}).status == 200
    resource = ConfigResource(ConfigResourceType.TOPIC, "flights")
    (entry,) = client.describe_configs(resource, ["retention.ms"])
    assert entry.value == "7000"
    rows = admin.get("configs", name="flights").json["rows"]
    assert [row["value"] for row in rows if row["own"]] == ["7000"]
    wrong = admin.post("configs/set", retention | {"value": "soon"})
    assert wrong.status == 400 and "INVALID_CONFIG" in wrong.text
    assert admin.post("configs/set", retention | {"value": None}).status == 200
    (entry,) = client.describe_configs(resource, ["retention.ms"])
    assert entry.value == "604800000"


def test_a_message_is_produced_as_it_was_given(broker, admin):
    given = {
        "topic": "flights",
        "partition": 1,
        "key": "schlüssel",
        "value": "<script>",
        "headers": {"h": "1"},
    }
    place = admin.post("produce", given).json
    packed = {"topic": "flights", "partition": 1, "value": "00ff", "encoding": "hex"}
    assert admin.post("produce", packed).json["offset"] == place["offset"] + 1
    empty = {"topic": "flights", "partition": 1, "key": "k", "value": None}
    admin.post("produce", empty)
    with Consumer(bootstrap_servers=broker.bootstrap) as consumer:
        consumer.assign([("flights", 1)])
        consumer.seek(("flights", 1), place["offset"])
        found = []
        while len(found) < 3:
            for records in consumer.poll(5000).values():
                found += records
    assert [(r.key, r.value, list(r.headers)) for r in found] == [
        ("schlüssel".encode(), b"<script>", [("h", b"1")]),
        (None, b"\x00\xff", []),
        (b"k", None, []),
    ]
    for wrong in ({"value": 5}, {"partition": 9}, {"headers": [1]}, {"topic": "nope"}):
        assert admin.post("produce", given | wrong).status in (400, 404, 502)


def test_members_and_lag_are_those_of_the_clients(broker, admin, client):
    for _ in range(5):
        admin.post("produce", {"topic": "flights", "partition": 0, "value": "v"})
    end = client.list_offsets({("flights", 0): LATEST})["flights", 0].offset
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": "<b>group",
        "client.id": "<i>client",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    with Consumer(settings) as consumer:
        consumer.subscribe(["flights"])
        while not consumer.poll(1000):
            pass
        consumer.commit({("flights", 0): end - 2})
        told = admin.get("group", id="<b>group").json
        (member,) = told["members"]
        assert member["client_id"] == "<i>client"
        assert member["partitions"] == ["flights-0", "flights-1"]
        assert told["state"] == "Stable"
        (row,) = (each for each in told["offsets"] if each["partition"] == 0)
        assert (row["committed"], row["end"], row["lag"]) == (end - 2, end, 2)
        assert row["member"] == member["id"]
        taken = {"group": "<b>group", "topic": "flights", "offsets": {"0": 0}}
        refused = admin.post("groups/reset", taken)
        assert refused.status == 400 and "UNKNOWN_MEMBER_ID" in refused.text
    groups = admin.get("groups", match="B>gr", fresh=1).json
    assert [row["id"] for row in groups["rows"]] == ["<b>group"]


def test_a_reset_is_shown_before_it_is_made(broker, admin, alice, client):
    client.alter_group_offsets("moved", {("flights", 0): 1})
    asked = {"group": "moved", "topic": "flights", "to": "latest"}
    for one in (admin, alice):
        plan = one.post("groups/plan", asked).json
        assert [(row["partition"], row["before"]) for row in plan["rows"]] == [
            (0, 1),
            (1, None),
        ]
    assert client.list_group_offsets("moved") == {("flights", 0): 1}
    late = admin.post("groups/plan", asked | {"to": 2**50}).json
    assert late == plan
    first = admin.post("groups/plan", asked | {"to": "earliest"}).json
    assert [row["after"] for row in first["rows"]] == [0, 0]
    offsets = {str(row["partition"]): row["after"] for row in plan["rows"]}
    made = {"group": "moved", "topic": "flights", "offsets": offsets}
    assert admin.post("groups/reset", made).json == {}
    ends = client.list_offsets({("flights", 0): LATEST, ("flights", 1): LATEST})
    assert client.list_group_offsets("moved") == {
        where: each.offset for where, each in ends.items()
    }
    assert admin.post("groups/delete", {"group": "moved"}).json == {}
    assert client.list_group_offsets("moved") == {}
    wrong = admin.post("groups/reset", made | {"offsets": {"x": 1}})
    assert wrong.status == 400 and "partition is not a number" in wrong.text


def test_a_share_group_is_shown_and_reset(broker, admin, client):
    client.create_topic("jobs", partitions=1)
    configs = {"share.auto.offset.reset": "earliest"}
    client.alter_configs(ConfigResource(ConfigResourceType.GROUP, "workers"), configs)
    with Producer(bootstrap_servers=broker.bootstrap) as producer:
        for number in range(5):
            producer.send("jobs", b"%d" % number).result(60)

    def shown():
        group = admin.get("group", id="workers").json
        assert group["type"].lower() == "share"
        return group, {row["partition"]: row for row in group["offsets"]}

    with ShareConsumer(
        bootstrap_servers=broker.bootstrap, group_id="workers", client_id="w"
    ) as consumer:
        consumer.subscribe(["jobs"])
        taken = 0
        while taken < 5:
            taken += sum(map(len, consumer.poll(1000).values()))
        group, rows = shown()
        assert [each["client_id"] for each in group["members"]] == ["w"]
        assert rows[0]["end"] == 5 and rows[0]["member"] is None
        consumer.commit_sync()
    wait_until(lambda: shown()[1][0]["lag"] == 0)
    assert shown()[1][0]["committed"] == 5
    asked = {"group": "workers", "topic": "jobs", "to": "earliest"}
    plan = admin.post("groups/plan", asked).json
    assert plan["rows"] == [{"partition": 0, "before": 5, "after": 0}]
    wait_until(lambda: shown()[0]["state"] == "Empty")
    asked = {"group": "workers", "topic": "jobs", "offsets": {"0": 0}}
    assert admin.post("groups/reset", asked).status == 200
    assert shown()[1][0]["committed"] == 0
