-- What readers ask, and what removes records and objects. Each removal does a bounded
-- piece of work and is called again until nothing is left; commits never wait for it.

-- The ends of partitions; the high watermark is -1 if there is no such partition.
CREATE FUNCTION mpbroker.heads_v1(a_topics uuid[], a_partitions int[])
RETURNS TABLE (log_start bigint, high_watermark bigint, bytes bigint)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(h.log_start, -1), coalesce(h.high_watermark, -1),
        coalesce(h.bytes, -1)
    FROM unnest(a_topics, a_partitions) WITH ORDINALITY AS w (topic_id, part, n)
    LEFT JOIN mpbroker.partition_head AS h
        ON h.topic_id = w.topic_id AND h.part = w.part AND NOT h.deleted
    ORDER BY w.n
$$;

-- The extents at and behind an offset of each partition: at most so many rows and bytes
-- of each, but one at least. Their number in the arrays begins with 1.
CREATE FUNCTION mpbroker.find_extents_v1(
    a_topics uuid[], a_partitions int[], a_offsets bigint[], a_rows int, a_bytes bigint)
RETURNS TABLE (n bigint, base_offset bigint, last_offset bigint, object_key uuid,
               "position" bigint, bytes int, max_timestamp bigint, committed_ms bigint)
LANGUAGE sql STABLE AS $$
    SELECT w.n, e.base_offset, e.last_offset, e.object_key, e.position, e.bytes,
        e.max_timestamp, o.committed_ms
    FROM unnest(a_topics, a_partitions, a_offsets)
        WITH ORDINALITY AS w (topic_id, part, from_offset, n)
    CROSS JOIN LATERAL (
        SELECT x.*, sum(x.bytes) OVER (ORDER BY x.last_offset) - x.bytes AS before
        FROM (SELECT * FROM mpbroker.extent AS y
              WHERE y.topic_id = w.topic_id AND y.part = w.part
                AND y.last_offset >= w.from_offset
              ORDER BY y.last_offset LIMIT a_rows) AS x
    ) AS e
    JOIN mpbroker.object AS o ON o.key = e.object_key
    WHERE e.before < a_bytes
    ORDER BY w.n, e.last_offset
$$;

-- DeleteRecords: nothing below an offset is there any more; -1 stands for the end.
-- Returns the start of the log, or -1 if there is no such partition.
CREATE FUNCTION mpbroker.delete_records_v1(a_topic uuid, a_partition int, a_before bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_start bigint;
BEGIN
    UPDATE mpbroker.partition_head AS h
    SET log_start = greatest(h.log_start, least(h.high_watermark,
        CASE WHEN a_before = -1 THEN h.high_watermark ELSE a_before END))
    WHERE h.topic_id = a_topic AND h.part = a_partition AND NOT h.deleted
    RETURNING h.log_start INTO v_start;
    RETURN coalesce(v_start, -1);
END $$;

-- Where the log would start by retention.ms and retention.bytes (-1: no limit), as far as
-- the oldest extents tell. Takes no lock: delete_records does what it says.
CREATE FUNCTION mpbroker.expired_to_v1(
    a_topic uuid, a_partition int, a_retention_ms bigint, a_retention_bytes bigint,
    a_rows int)
RETURNS bigint LANGUAGE sql STABLE AS $$
    WITH oldest AS (
        SELECT e.last_offset, h.bytes - sum(e.bytes) OVER (ORDER BY e.last_offset)
                AS bytes_left,
            e.max_timestamp, h.log_start
        FROM mpbroker.partition_head AS h
        CROSS JOIN LATERAL (
            SELECT * FROM mpbroker.extent AS x
            WHERE x.topic_id = h.topic_id AND x.part = h.part
              AND x.last_offset >= h.log_start
            ORDER BY x.last_offset LIMIT a_rows) AS e
        WHERE h.topic_id = a_topic AND h.part = a_partition
    ), judged AS (
        SELECT o.last_offset, bool_and(
            (a_retention_bytes >= 0 AND o.bytes_left >= a_retention_bytes)
            OR (a_retention_ms >= 0 AND o.max_timestamp
                < extract(epoch FROM clock_timestamp()) * 1000 - a_retention_ms)
        ) OVER (ORDER BY o.last_offset) AS expired
        FROM oldest AS o
    )
    SELECT coalesce(max(j.last_offset) + 1, -1) FROM judged AS j WHERE j.expired
$$;

-- Delete extents that are wholly below the start of the log; returns how many.
CREATE FUNCTION mpbroker.trim_extents_v1(a_topic uuid, a_partition int, a_rows int)
RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_count int;
    v_bytes bigint;
    v_keys uuid[];
BEGIN
    WITH old AS (
        SELECT e.last_offset FROM mpbroker.extent AS e
        WHERE e.topic_id = a_topic AND e.part = a_partition AND e.last_offset < (
            SELECT h.log_start FROM mpbroker.partition_head AS h
            WHERE h.topic_id = a_topic AND h.part = a_partition)
        ORDER BY e.last_offset LIMIT a_rows FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM mpbroker.extent AS e USING old
        WHERE e.topic_id = a_topic AND e.part = a_partition
          AND e.last_offset = old.last_offset
        RETURNING e.object_key, e.bytes
    )
    SELECT count(*), sum(g.bytes), array_agg(g.object_key)
    INTO v_count, v_bytes, v_keys FROM gone AS g;
    IF v_count = 0 THEN
        RETURN 0;
    END IF;
    -- In the order of their keys, since other partitions' extents are in them, too.
    PERFORM 1 FROM mpbroker.object AS o WHERE o.key = ANY (v_keys)
    ORDER BY o.key FOR NO KEY UPDATE;
    UPDATE mpbroker.object AS o
    SET live_extents = o.live_extents - k.extents, changed = clock_timestamp()
    FROM (SELECT key, count(*) AS extents FROM unnest(v_keys) AS key GROUP BY key) AS k
    WHERE o.key = k.key;
    -- Last: commits wait for this row.
    UPDATE mpbroker.partition_head AS h SET bytes = h.bytes - v_bytes
    WHERE h.topic_id = a_topic AND h.part = a_partition;
    RETURN v_count;
END $$;

-- Delete a topic: no commit finds it from now on. Its extents are trimmed afterwards.
CREATE FUNCTION mpbroker.delete_topic_v1(a_topic uuid) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM mpbroker.partition_head AS h WHERE h.topic_id = a_topic
    ORDER BY h.topic_id, h.part FOR NO KEY UPDATE;
    UPDATE mpbroker.partition_head AS h SET deleted = true, log_start = h.high_watermark
    WHERE h.topic_id = a_topic;
END $$;

-- Remove the partitions of deleted topics that have no extents left; returns how many.
CREATE FUNCTION mpbroker.remove_partitions_v1(a_topic uuid, a_limit int) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    v_parts int[];
BEGIN
    SELECT array_agg(p.part) INTO v_parts FROM (
        SELECT h.part FROM mpbroker.partition_head AS h
        WHERE h.topic_id = a_topic AND h.deleted AND NOT EXISTS (
            SELECT 1 FROM mpbroker.extent AS e
            WHERE e.topic_id = h.topic_id AND e.part = h.part)
        ORDER BY h.part LIMIT a_limit FOR UPDATE SKIP LOCKED) AS p;
    DELETE FROM mpbroker.producer AS s
    WHERE s.topic_id = a_topic AND s.part = ANY (v_parts);
    DELETE FROM mpbroker.partition_head AS h
    WHERE h.topic_id = a_topic AND h.part = ANY (v_parts);
    RETURN coalesce(cardinality(v_parts), 0);
END $$;

-- Give up objects that were pending for so long, and those that nothing refers to;
-- returns how many. An object that a commit has locked is left alone.
CREATE FUNCTION mpbroker.give_up_objects_v1(a_age interval, a_limit int) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    v_count int;
BEGIN
    UPDATE mpbroker.object AS o SET state = 'd', changed = clock_timestamp()
    FROM (SELECT x.key FROM mpbroker.object AS x
          WHERE (x.state = 'p' OR (x.state = 'l' AND x.live_extents = 0))
            AND x.changed < clock_timestamp() - a_age
          LIMIT a_limit FOR UPDATE SKIP LOCKED) AS old
    WHERE o.key = old.key;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- Objects that are dead for so long: their bytes may be deleted.
CREATE FUNCTION mpbroker.dead_objects_v1(a_age interval, a_limit int)
RETURNS TABLE (key uuid) LANGUAGE sql STABLE AS $$
    SELECT o.key FROM mpbroker.object AS o
    WHERE o.state = 'd' AND o.changed < clock_timestamp() - a_age
    ORDER BY o.changed LIMIT a_limit
$$;

-- Forget dead objects whose bytes are deleted.
CREATE FUNCTION mpbroker.forget_objects_v1(a_keys uuid[]) RETURNS void
LANGUAGE sql AS $$
    DELETE FROM mpbroker.object AS o WHERE o.key = ANY (a_keys) AND o.state = 'd'
$$;

-- Forget producers that were silent for so long; returns how many.
CREATE FUNCTION mpbroker.expire_producers_v1(a_age interval, a_limit int) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    v_count int;
BEGIN
    DELETE FROM mpbroker.producer AS s USING (
        SELECT x.topic_id, x.part, x.producer_id FROM mpbroker.producer AS x
        WHERE x.seen < clock_timestamp() - a_age LIMIT a_limit
        FOR UPDATE SKIP LOCKED) AS old
    WHERE s.topic_id = old.topic_id AND s.part = old.part
      AND s.producer_id = old.producer_id;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;
