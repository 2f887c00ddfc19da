"""The URL of an object store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.config_def import ConfigError
from mpbroker.base.store_url import StoreUrl
from mpbroker.config.broker_config import BrokerConfig

PLAIN = "s3://bucket/prefix"
STORE = {
    "remote.log.storage.system.enable": "true",
    "remote.storage.url": PLAIN,
}


def load(settings):
    return BrokerConfig.load(settings, None, {}, cores=1)


@given(
    st.sampled_from(["s3", "s3a"]),
    st.from_regex(r"[a-z0-9][a-z0-9.-]*(/[\w.%+ -]+)*", fullmatch=True),
    st.just("") | st.from_regex(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?", fullmatch=True),
    st.just("") | st.from_regex(r"[a-z0-9-]+", fullmatch=True),
)
def test_the_text_of_a_url_is_read_as_the_same_url(scheme, path, endpoint, region):
    url = StoreUrl(f"{scheme}://{path}", endpoint, region)
    assert StoreUrl.parse(str(url)) == url


@given(st.text(max_size=80) | st.text(max_size=60).map("s3://b/p?".__add__))
def test_any_text_is_a_url_or_refused(text):
    try:
        url = StoreUrl.parse(text)
    except ValueError:
        return
    assert StoreUrl.parse(str(url)) == url


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ftp://x/y", "must begin with s3://"),
        ("s3://", "must begin with s3://"),
        ("s3://key:secret@bucket/x", "taken from the environment"),
        ("s3://b/p?endpoint=host:9000", "not a server's URL, such as http://HOST:PORT"),
        ("s3://b/p?endpoint=http://user:x@host", "not a server's URL"),
        ("s3://b/p?endpoint=http://a&endpoint=http://b", "names its endpoint twice"),
        ("s3://b/p?region=a b", "not a region's name"),
        ("s3://b/p?zone=a", "an option 'zone'; there are 'endpoint' and 'region'"),
        ("gs://b/p?region=a", "gs:// has no region"),
    ],
)
def test_a_wrong_url_is_told(text, says):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")) as told:
        StoreUrl.parse(text)
    assert "secret" not in str(told.value)


def test_a_question_mark_may_be_part_of_a_directorys_name():
    assert StoreUrl.parse("file:///srv/what?") == StoreUrl("file:///srv/what?")


def test_settings_name_the_stores_server_and_region():
    config = load(
        {
            **STORE,
            "remote.storage.endpoint": "http://127.0.0.1:9000",
            "remote.storage.region": "eu-1",
        }
    )
    assert config.remote_storage_url == PLAIN
    assert config.remote_storage_place == (
        f"{PLAIN}?endpoint=http://127.0.0.1:9000&region=eu-1"
    )
    assert load(STORE).remote_storage_place == PLAIN


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"remote.storage.endpoint": "host:9000"}, "not a server's URL"),
        ({"remote.storage.region": "a b"}, "not a region's name"),
        (
            {"remote.storage.url": f"{PLAIN}?region=a", "remote.storage.region": "a"},
            "remote.storage.url names the region, too; leave one out",
        ),
        (
            {
                "remote.storage.url": "file:///srv",
                "remote.storage.endpoint": "http://x",
            },
            "a directory has no endpoint",
        ),
        (
            {"diskless.storage.endpoint": "http://x"},
            "diskless.storage.url is not set; set it",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_told(settings, says):
    with pytest.raises(ConfigError, match=says):
        load({**STORE, **settings})
