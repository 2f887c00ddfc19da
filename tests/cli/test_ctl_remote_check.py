"""What the doctor says about a remote store, and what status shows of it."""

from __future__ import annotations

import os
import re

import pytest

from mpbroker.cli.ctl.ctl_host_checks import FAIL, OK, WARN
from mpbroker.cli.ctl.ctl_remote_check import check_copies, check_remote_store, examine
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.store_owner import OWNER_KEY, StoreOwner, claim
from tests.support.canned_s3 import canned_s3


@pytest.fixture
def s3(monkeypatch):
    """Run an S3 server that refuses some requests; its bucket belongs to a broker."""
    rules = {}

    def refuse(method, path):
        return rules.get(method)

    with canned_s3(refuse) as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        ObjectStore("s3://bucket/x", retry_s=1).put(OWNER_KEY, b"cluster.id=mine\n")
        yield rules


@pytest.mark.parametrize(
    ("method", "answer", "says"),
    [
        ("GET", (403, "InvalidAccessKeyId"), "does not know the access key"),
        ("GET", (403, "SignatureDoesNotMatch"), "secret key does not belong"),
        ("GET", (403, "RequestTimeTooSkewed"), "this machine's clock is wrong"),
        ("GET", (400, "ExpiredToken"), "the credentials have expired"),
        ("GET", (404, "NoSuchBucket"), "there is no such bucket: create it"),
        ("GET", (403, "AccessDenied"), "cannot read owner: .*no right to do this"),
        (
            "PUT",
            (403, "AccessDenied"),
            "cannot write probe-.*: .*no right to do this",
        ),
        (
            "POST",
            (403, "AccessDenied"),
            "cannot delete probe-.*: .*no right to do this",
        ),
        (
            "POST",
            (200, "AccessDenied"),
            "cannot delete probe-.*: .*no right to do this",
        ),
    ],
)
def test_each_mistake_has_its_sentence(s3, method, answer, says):
    s3[method] = answer
    level, text, fix = examine("s3://bucket/x", "mine")
    assert level == FAIL and "rights to write, read and delete" in fix
    assert re.search(says, text), text
    assert "hidden" not in text and "\n" not in text


def test_a_store_that_works_is_told_and_one_of_another_broker_is_not_used(s3):
    level, text, _ = examine("s3://bucket/x", "mine")
    assert level == OK, text
    assert "written, read and deleted in" in text
    level, text, _ = examine("s3://bucket/x", "other")
    assert level == FAIL and "belongs to another broker (cluster.id=mine)" in text
    level, text, _ = examine("s3://bucket/y", "mine")
    assert level == FAIL and "belongs to no broker" in text


def test_the_check_runs_with_the_environment_of_the_broker(tmp_path):
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store"
    claim(ObjectStore(url), StoreOwner("mine", 1))
    found = check_remote_store(url, "mine", os.getpid())
    assert found.level == OK, found
    assert not list((tmp_path / "store").glob("probe*"))
    found = check_remote_store(f"{url}/nothing", "mine", os.getpid())
    assert found.level == FAIL and "cannot be used" in found.text


def test_a_store_that_fails_is_a_warning_with_what_is_left():
    figures = {"lag_segments": 2, "lag_bytes": 1 << 20, "copy_errors": 0}
    assert check_copies({**figures, "fetch_errors": 0}).level == OK
    found = check_copies({**figures, "fetch_errors": 3})
    assert found.level == WARN and "2 segments to be copied (1 MiB)" in found.text
