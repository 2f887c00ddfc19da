"""Mirror: copy topics and groups from a running cluster until both sides are equal.

One run has these steps, and may be killed in each of them. The next run begins with the
first step again, and skips work that is done:

    1. create missing topics, with the setting mirror.source from the first moment on,
       so that no other producer can write; grow others; set their configs
    2. copy records (copy_session.py), until the target has what the source has
    3. commit the groups' offsets, which stay the same
    4. compare both sides (verification.py)
    5. remove mirror.source: from now on producers may write to the topics

With ``follow`` steps 1 to 3 are repeated until the mirror is stopped. Then step 4
follows, and the topics go on being mirrored topics.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.admin import group_admin
from mpbroker.client.admin.config_admin import (
    ConfigResource,
    ConfigResourceType,
    alter_configs,
    describe_configs,
)
from mpbroker.client.admin.topic_admin import (
    EARLIEST,
    LATEST,
    create_partitions,
    create_topic,
    list_offsets,
    topic_id_text,
)
from mpbroker.client.backoff import Backoff
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.fetcher import LeaderLostError, OffsetOutOfRangeError
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.client.mirror.copy_session import CopySession, Counts, MirrorError
from mpbroker.client.mirror.verification import (
    Digest,
    Range,
    digests,
    last_records,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

SOURCE: Final = "mirror.source"
_TOPIC: Final = ConfigResourceType.TOPIC
# Settings that are about replicas and remote storage of the source.
_OWN_CONFIGS: Final = re.compile(
    r"(follower|leader)\.replication\.|remote\.|local\.retention\.|mirror\.|flush\.acks"
)
_TICK_S: Final = 1.0
_STOPPING_S: Final = 10.0  # how long a mirror that was stopped tries again
_ATTEMPTS: Final = 5
_PASSING: Final = frozenset(
    {
        ErrorCode.BROKER_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.NOT_CONTROLLER,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.OFFSET_OUT_OF_RANGE,  # the target has lost what it answered
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        # A broker that starts may not know its topics yet.
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
)
_BACKOFF: Final = Backoff(100, 3_000)


class Progress(NamedTuple):
    """The progress of a mirror.

    Attributes:
        step: "copying", "waiting" or "verifying".
        records, bytes: the records and bytes copied since the program was started.
            While ``verifying``, the bytes are those read for the comparison.
        left: the number of offsets that are still to be copied.
        partitions: the number of partitions of all topics.
        partitions_left: the number of partitions that are not copied to the end.
    """

    step: str
    records: int
    bytes: int
    left: int
    partitions: int
    partitions_left: int


class Watcher(Protocol):
    """Shows a user the work of a mirror, and tells it when to stop."""

    def say(self, line: str) -> None:
        """Show a user one line about an event."""

    def show(self, progress: Progress) -> None:
        """Show a user the progress of the mirror; called often."""

    def stopped(self) -> bool:
        """Return whether the mirror must stop."""


class Report(NamedTuple):
    """The result of a mirror: counts, and the checksum of the compared records.

    Attributes:
        topics, partitions: the numbers of mirrored topics and partitions.
        copied: the number of records that this run has copied.
        records: the number of records that were compared, copied by this run or before.
        checksum: a checksum over those of all partitions.
        groups: the number of groups whose offsets were committed at the target.
        is_complete: whether the topics are mirrored no more, and take records of
            producers.
    """

    topics: int
    partitions: int
    copied: int
    records: int
    checksum: int
    groups: int
    is_complete: bool


class _Topics(NamedTuple):
    """The topics to copy: their partition counts and mirror.source values, by name."""

    partitions: dict[str, int]
    origins: dict[str, str]


class Mirror:
    """Copies topics whose names match a pattern.

    Args:
        source: the cluster to copy from.
        target: the cluster to copy to, which must be an mpbroker.
        pattern: the pattern that the whole name of a topic must match.
        origin: the addresses of the source, for messages and the topics' configs.
        watcher: gets messages and the progress, and says when to stop.
        follow: whether to go on until the watcher says stop.
        retry_s: how long to try again without progress, in seconds.
    """

    def __init__(
        self,
        source: Cluster,
        target: Cluster,
        pattern: re.Pattern[str],
        *,
        origin: str,
        watcher: Watcher,
        follow: bool = False,
        retry_s: float = 300.0,
    ) -> None:
        self._source = source
        self._target = target
        self._pattern = pattern
        self._origin = origin
        self._follow = follow
        self._retry_s = retry_s
        self._say = watcher.say
        self._show = watcher.show
        self._stopped = watcher.stopped
        self._counts = Counts()
        self._groups: dict[str, dict[TopicPartition, group_admin.Commit]] = {}
        self._left_alone: set[str] = set()
        self._rng = random.Random()

    def run(self) -> Report:
        """Copy topics and groups, compare both sides, and complete the mirror.

        Raises:
            MirrorError: a topic cannot be mirrored, or its copy differs.
            MpbrokerError: a broker refused, or no broker answered for too long.
        """
        failures, since, before = 0, time.monotonic(), -1
        while True:
            try:
                return self._attempt()
            except MpbrokerError as error:
                if not _may_pass(error):
                    raise
                if self._counts.bytes != before:
                    failures, since, before = 0, time.monotonic(), self._counts.bytes
                limit_s = _STOPPING_S if self._stopped() else self._retry_s
                if time.monotonic() - since > limit_s:
                    raise
                if failures in (0, 10):
                    self._say(f"{error}; trying again")
                time.sleep(_BACKOFF.delay_ms(failures, self._rng) / 1000)
                failures += 1

    def _attempt(self) -> Report:
        while True:
            topics = self._prepare()
            if not topics.partitions:
                return Report(0, 0, 0, 0, 0, 0, is_complete=True)
            session = self._session(topics)
            if not self._copy(session, topics):
                continue  # the source has more topics or partitions now
            session.even_ends()
            self._copy_groups(session)
            digest = self._verify(session)
            is_complete = not self._follow and not self._stopped()
            if is_complete:
                before = session.goals
                session.look_for_goals()
                if session.goals != before:
                    self._say("the source still gets records: copying them, too")
                    continue
                for name in topics.origins:
                    alter_configs(
                        self._target, ConfigResource(_TOPIC, name), {}, [SOURCE]
                    )
            return Report(
                len(topics.partitions),
                sum(topics.partitions.values()),
                self._counts.records,
                digest.records,
                digest.checksum,
                len(self._groups),
                is_complete,
            )

    # -- topics ------------------------------------------------------------------------

    def _prepare(self) -> _Topics:
        """Create and grow topics, and set their configs; return the topics to copy."""
        found = self._find()
        if not found.partitions:
            raise MirrorError(
                f"the source has no topic that matches {self._pattern.pattern!r}"
            )
        here = {
            topic.name: len(topic.partitions)
            for topic in self._target.metadata(None).topics
        }
        mirrored: dict[str, str] = {}
        for name, count in found.partitions.items():
            origin = found.origins[name]
            if name not in here:
                self._create(name, count, origin)
            else:
                known = self._known_origin(name)
                if not known:
                    self._require_complete(name, count, here[name])
                    continue
                if _identity(known) != _identity(origin):
                    raise MirrorError(
                        f"topic {name!r} is being mirrored from {known}, which is not"
                        f" {origin}"
                    )
                if here[name] > count:
                    raise MirrorError(
                        f"topic {name!r} has {here[name]} partitions here and {count}"
                        " at the source"
                    )
                if here[name] < count:
                    create_partitions(self._target, name, count)
            mirrored[name] = origin
            self._copy_configs(name)
        return _Topics({name: found.partitions[name] for name in mirrored}, mirrored)

    def _find(self) -> _Topics:
        """Return the source's topics that match the pattern, without internal ones."""
        answer = self._source.metadata(None)
        partitions, origins = {}, {}
        for topic in answer.topics:
            name = topic.name or ""
            if topic.is_internal or not self._pattern.fullmatch(name):
                continue
            partitions[name] = len(topic.partitions)
            topic_id = topic_id_text(topic.topic_id) if any(topic.topic_id) else "-"
            origins[name] = (
                f"{self._origin} cluster {answer.cluster_id or '-'} topic {topic_id}"
            )
        return _Topics(dict(sorted(partitions.items())), origins)

    def _create(self, name: str, count: int, origin: str) -> None:
        try:
            create_topic(self._target, name, partitions=count, configs={SOURCE: origin})
        except ApiError as error:
            if error.error_code is ErrorCode.INVALID_CONFIG:
                raise MirrorError(
                    f"the target does not know {SOURCE}; it must be an mpbroker of this"
                    f" version: {error}"
                ) from error
            if error.error_code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
            return  # created by a request whose answer was lost
        self._say(f"created topic {name} with {count} partitions")

    def _known_origin(self, name: str) -> str:
        resource = ConfigResource(_TOPIC, name)
        for config in describe_configs(self._target, resource, [SOURCE]):
            return config.value or ""
        return ""

    def _require_complete(self, name: str, count: int, here: int) -> None:
        """Check that a topic without mirror.source has exactly the source's records.

        An earlier run leaves each topic that it completes without mirror.source.

        Raises:
            MirrorError: the topic has other records, so no earlier run completed it.
        """
        partitions = [TopicPartition(name, number) for number in range(count)]
        if here == count:
            source = group_admin.partitions_of(self._source, [name])
            target = group_admin.partitions_of(self._target, [name])
            ranges = self._ranges(partitions, source, target)
            ends = list_offsets(self._source, dict.fromkeys(partitions, LATEST), source)
            if all(ranges[where].end == ends[where].offset for where in partitions):
                theirs = digests(self._source, ranges, source, self._verified)
                ours = digests(self._target, ranges, target, self._verified)
                if theirs == ours:
                    if name not in self._left_alone:
                        self._left_alone.add(name)
                        self._say(f"topic {name} is complete since an earlier run")
                    return
        raise MirrorError(
            f"topic {name!r} exists here, is not being mirrored, and has not what the"
            " source has; delete it, or leave it out by --topics"
        )

    def _ranges(
        self,
        partitions: Sequence[TopicPartition],
        source: Mapping[TopicPartition, int],
        target: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int] | None = None,
    ) -> dict[TopicPartition, Range]:
        """Return the range of offsets that both sides have, by partition.

        Args:
            partitions: the partitions.
            source: the leader's node id at the source, by partition.
            target: the leader's node id at the target, by partition.
            ends: the ends of the ranges; None: the lower of both log end offsets.
        """
        earliest = dict.fromkeys(partitions, EARLIEST)
        theirs = list_offsets(self._source, earliest, source)
        ours = list_offsets(self._target, earliest, target)
        if ends is None:
            latest = dict.fromkeys(partitions, LATEST)
            here = list_offsets(self._target, latest, target)
            there = list_offsets(self._source, latest, source)
            ends = {
                where: min(here[where].offset, there[where].offset)
                for where in partitions
            }
        return {
            where: Range(max(theirs[where].offset, ours[where].offset), ends[where])
            for where in partitions
        }

    def _copy_configs(self, name: str) -> None:
        """Set the configs of a topic to their values at the source."""
        resource = ConfigResource(_TOPIC, name)
        theirs = {
            config.name: config.value
            for config in describe_configs(self._source, resource)
        }
        changes = {
            config.name: value
            for config in describe_configs(self._target, resource)
            if not _OWN_CONFIGS.match(config.name)
            and (value := theirs.get(config.name)) is not None
            and value != config.value
        }
        if changes:
            alter_configs(self._target, resource, changes)

    # -- records -----------------------------------------------------------------------

    def _session(self, topics: _Topics) -> CopySession:
        names = list(topics.partitions)
        source = group_admin.partitions_of(self._source, names)
        target = group_admin.partitions_of(self._target, names)
        both = {where: leader for where, leader in source.items() if where in target}
        self._source_leaders, self._target_leaders = both, target
        return CopySession(self._source, self._target, both, target, self._counts)

    def _copy(self, session: CopySession, topics: _Topics) -> bool:
        """Copy up to the source's log ends, or until the mirror is stopped.

        Returns:
            False if the source has other topics or partitions than the session.
        """
        due = time.monotonic() + _TICK_S
        while session.left if not self._follow else not self._stopped():
            if self._stopped():
                break
            session.step()
            self._tell("copying" if session.left else "waiting", session)
            if time.monotonic() >= due:
                if self._follow and not session.left:
                    session.even_ends()
                    self._copy_groups(session)
                session.settle()
                found = self._find().partitions
                if {name: found.get(name) for name in topics.partitions} != (
                    topics.partitions
                ) or set(found) - set(topics.partitions) - self._left_alone:
                    return False
                session.look_for_goals()
                due = time.monotonic() + _TICK_S
        session.settle()
        return True

    def _tell(self, step: str, session: CopySession) -> None:
        counts = self._counts
        self._show(
            Progress(
                step,
                counts.records,
                counts.bytes,
                session.left,
                len(session.goals),
                session.partitions_left,
            )
        )

    # -- groups ------------------------------------------------------------------------

    def _copy_groups(self, session: CopySession) -> None:
        """Commit the offsets of the source's groups for the topics that are copied.

        For an offset above the end of the copy, that end is committed.
        """
        for listed in group_admin.list_groups(self._source):
            if listed.protocol_type not in ("consumer", ""):
                continue
            group = listed.group_id
            try:
                commits = group_admin.commits(self._source, group)
            except ApiError as error:
                if error.error_code in _PASSING:
                    raise
                self._say_once(group, f"group {group}: {error}")
                continue
            wanted = {
                where: commit._replace(
                    offset=min(commit.offset, session.reached[where])
                )
                for where, commit in commits.items()
                if where in session.reached
            }
            if not wanted or self._groups.get(group) == wanted:
                continue
            try:
                group_admin.commit(self._target, group, wanted)
            except ApiError as error:
                if error.error_code in _PASSING:
                    raise
                self._say_once(
                    group,
                    f"group {group} keeps the offsets that it has here, as it has"
                    f" members: {error}",
                )
                continue
            self._groups[group] = wanted

    def _say_once(self, name: str, line: str) -> None:
        if f"group {name}" not in self._left_alone:
            self._left_alone.add(f"group {name}")
            self._say(line)

    # -- the comparison ----------------------------------------------------------------

    def _verify(self, session: CopySession) -> Digest:
        """Compare all records that this run and earlier ones have copied.

        Raises:
            MirrorError: a partition differs.
        """
        ends = dict(session.reached)
        for attempt in range(_ATTEMPTS):
            ranges = self._ranges(
                list(ends), self._source_leaders, self._target_leaders, ends
            )
            try:
                return self._compare(ranges)
            except OffsetOutOfRangeError:
                # Retention has deleted records on one side since the ranges were read.
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _compare(self, ranges: Mapping[TopicPartition, Range]) -> Digest:
        source, target = self._source_leaders, self._target_leaders
        theirs = digests(self._source, ranges, source, self._verified)
        ours = digests(self._target, ranges, target, self._verified)
        records, checksum = 0, 0
        for where, found in sorted(ours.items()):
            records += found.records
            checksum = (checksum * 31 + found.checksum) & 0xFFFFFFFF
            if found == theirs[where]:
                continue
            if not self._is_compacted(where.topic) or not self._has_same_keys(
                where, ranges[where]
            ):
                raise MirrorError(
                    f"{where} differs: {theirs[where].records} records with checksum"
                    f" {theirs[where].checksum:08x} at the source,"
                    f" {found.records} with {found.checksum:08x} here"
                )
        return Digest(records, checksum)

    def _is_compacted(self, name: str) -> bool:
        resource = ConfigResource(_TOPIC, name)
        (config,) = describe_configs(self._source, resource, ["cleanup.policy"])
        return "compact" in (config.value or "")

    def _has_same_keys(self, where: TopicPartition, offsets: Range) -> bool:
        theirs = last_records(
            self._source, where, offsets, self._source_leaders, self._verified
        )
        ours = last_records(
            self._target, where, offsets, self._target_leaders, self._verified
        )
        return theirs == ours

    def _verified(self, size: int) -> None:
        self._counts.verified += size
        self._show(
            Progress("verifying", self._counts.records, self._counts.verified, 0, 0, 0)
        )


def _identity(origin: str) -> str:
    """Return the ids of cluster and topic in a mirror.source value.

    The addresses in front of them, which may change, are left out.
    """
    return origin.partition(" ")[2]


def _may_pass(error: MpbrokerError) -> bool:
    if isinstance(error, ApiError):
        return error.error_code in _PASSING
    return isinstance(
        error, (BrokerUnavailableError, LeaderLostError, OffsetOutOfRangeError)
    )
