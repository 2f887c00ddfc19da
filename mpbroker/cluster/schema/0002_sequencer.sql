-- The sequencer: the order of all records, and the objects that hold their bytes.
--
-- An object is registered as pending before its bytes are written, becomes live by
-- commit_object, and dead when nothing needs it. A dead object is never committed, a
-- live one never given up: the row lock of the object decides.

CREATE TABLE mpbroker.partition_head (
    topic_id uuid,
    part int,
    log_start bigint NOT NULL DEFAULT 0,
    high_watermark bigint NOT NULL DEFAULT 0,
    bytes bigint NOT NULL DEFAULT 0,  -- of the extents that are there
    deleted boolean NOT NULL DEFAULT false,
    PRIMARY KEY (topic_id, part)
) WITH (fillfactor = 50);  -- every commit updates it: in its own page

CREATE TABLE mpbroker.object (
    key uuid PRIMARY KEY,
    node int NOT NULL,
    state "char" NOT NULL DEFAULT 'p',  -- p pending, l live, d dead
    changed timestamptz NOT NULL DEFAULT clock_timestamp(),  -- when it got this state
    bytes bigint,
    live_extents int NOT NULL DEFAULT 0,
    -- What commit_object has answered, for a caller that asks again.
    base_offsets bigint[],
    errors smallint[],
    committed_ms bigint,
    repeated int NOT NULL DEFAULT 0
) WITH (fillfactor = 80);
-- For the collector, which looks for the oldest pending and dead ones.
CREATE INDEX object_to_collect ON mpbroker.object (state, changed)
    WHERE state <> 'l' OR live_extents = 0;

-- A run of batches of one partition in one object, without a gap between their bytes.
CREATE TABLE mpbroker.extent (
    topic_id uuid,
    part int,
    base_offset bigint NOT NULL,
    last_offset bigint,
    object_key uuid NOT NULL,
    position bigint NOT NULL,
    bytes int NOT NULL,
    max_timestamp bigint NOT NULL,
    PRIMARY KEY (topic_id, part, last_offset)
);

-- The last five batches of a producer, as Kafka keeps them.
CREATE TABLE mpbroker.producer (
    topic_id uuid,
    part int,
    producer_id bigint,
    epoch smallint NOT NULL,
    recent bigint[] NOT NULL,  -- first sequence, last sequence, base offset; oldest first
    seen timestamptz NOT NULL,
    PRIMARY KEY (topic_id, part, producer_id)
) WITH (fillfactor = 70);

CREATE FUNCTION mpbroker.create_partitions_v1(a_topic uuid, a_count int)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO mpbroker.partition_head (topic_id, part)
    SELECT a_topic, n FROM generate_series(0, a_count - 1) AS n
    ON CONFLICT DO NOTHING
$$;

-- Register objects that a node is going to write; returns their keys.
CREATE FUNCTION mpbroker.register_objects_v1(a_node int, a_keys uuid[])
RETURNS void LANGUAGE sql AS $$
    INSERT INTO mpbroker.object (key, node)
    SELECT key, a_node FROM unnest(a_keys) AS key
    ON CONFLICT DO NOTHING
$$;

-- Commit an object: judge each of its batches, and give offsets to those that are new.
--
-- One call is one transaction, which is the point where records get their order. It may
-- be repeated: a key that is committed gets the answer of the first time. Arrays have
-- one element for each batch. Batches of one partition are ordered by their producer,
-- and then as they stand in the arrays; a caller that writes them in that order gets one
-- extent for each partition.
--
-- a_records: the last offset delta + 1. a_max_timestamps: -1 if the topic's time stamps
-- are the broker's; they get the time of the commit.
-- Errors are Kafka's: 3 unknown partition, 45 out of order sequence, 47 old epoch. A
-- duplicate has no error, and the offset of the batch that it repeats.
-- Raises MP001: the object was given up, or was never registered.
CREATE FUNCTION mpbroker.commit_object_v1(
    a_key uuid,
    a_bytes bigint,
    a_topics uuid[],
    a_partitions int[],
    a_records int[],
    a_positions bigint[],
    a_sizes int[],
    a_max_timestamps bigint[],
    a_producer_ids bigint[],
    a_epochs smallint[],
    a_sequences int[],
    OUT base_offsets bigint[],
    OUT errors smallint[],
    OUT committed_ms bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_count constant int := cardinality(a_topics);
    v_object mpbroker.object;
    batch record;
    v_topic uuid;
    v_part int;
    v_next_offset bigint;
    v_producer bigint;
    v_epoch smallint;
    v_recent bigint[];
    v_last_sequence bigint;
    v_original bigint;
    accepted boolean[] := array_fill(false, ARRAY[v_count]);
    -- Producers to be written: the last element belongs to the batch at hand.
    p_topics uuid[] := '{}';
    p_parts int[] := '{}';
    p_ids bigint[] := '{}';
    p_epochs smallint[] := '{}';
    p_recents text[] := '{}';
    v_known boolean;
BEGIN
    SELECT * INTO v_object FROM mpbroker.object AS o WHERE o.key = a_key FOR UPDATE;
    IF NOT FOUND OR v_object.state = 'd' THEN
        RAISE EXCEPTION 'object % was given up', a_key USING ERRCODE = 'MP001';
    END IF;
    IF v_object.state = 'l' THEN
        -- The answer may be given only when the first commit is on the standbys, whose
        -- wait an administrator may have cancelled. This write's own commit waits.
        UPDATE mpbroker.object AS o SET repeated = o.repeated + 1 WHERE o.key = a_key;
        base_offsets := v_object.base_offsets;
        errors := v_object.errors;
        committed_ms := v_object.committed_ms;
        RETURN;
    END IF;

    base_offsets := array_fill(-1::bigint, ARRAY[v_count]);
    errors := array_fill(0::smallint, ARRAY[v_count]);
    -- In one order for all callers: no deadlocks.
    PERFORM 1 FROM mpbroker.partition_head AS h
    WHERE (h.topic_id, h.part) IN (SELECT * FROM unnest(a_topics, a_partitions))
    ORDER BY h.topic_id, h.part FOR NO KEY UPDATE;
    committed_ms := floor(extract(epoch FROM clock_timestamp()) * 1000);

    FOR batch IN
        SELECT b.*, h.high_watermark, s.epoch AS known_epoch, s.recent AS known_recent
        FROM unnest(a_topics, a_partitions, a_records, a_producer_ids, a_epochs,
                    a_sequences)
            WITH ORDINALITY
            AS b (topic_id, part, records, producer_id, epoch, sequence, n)
        LEFT JOIN mpbroker.partition_head AS h
            ON h.topic_id = b.topic_id AND h.part = b.part AND NOT h.deleted
        LEFT JOIN mpbroker.producer AS s
            ON s.topic_id = b.topic_id AND s.part = b.part
            AND s.producer_id = b.producer_id
        ORDER BY b.topic_id, b.part, b.producer_id, b.n
    LOOP
        IF batch.high_watermark IS NULL THEN
            errors[batch.n] := 3;
            CONTINUE;
        END IF;
        IF batch.topic_id IS DISTINCT FROM v_topic OR batch.part <> v_part THEN
            v_topic := batch.topic_id;
            v_part := batch.part;
            v_next_offset := batch.high_watermark;
            v_producer := NULL;
        END IF;
        IF batch.producer_id >= 0 THEN
            IF batch.producer_id IS DISTINCT FROM v_producer THEN
                v_producer := batch.producer_id;
                v_epoch := batch.known_epoch;
                v_recent := coalesce(batch.known_recent, '{}');
                v_known := false;  -- not yet among the producers to be written
            END IF;
            v_last_sequence := (batch.sequence::bigint + batch.records - 1) & 2147483647;
            IF batch.epoch < v_epoch THEN
                errors[batch.n] := 47;
                CONTINUE;
            ELSIF batch.epoch > v_epoch THEN
                IF batch.sequence <> 0 THEN
                    errors[batch.n] := 45;
                    CONTINUE;
                END IF;
                v_recent := '{}';
            ELSIF batch.sequence
                <> ((v_recent[cardinality(v_recent) - 1] + 1) & 2147483647) THEN
                v_original := NULL;
                FOR i IN 1 .. cardinality(v_recent) BY 3 LOOP
                    IF v_recent[i] = batch.sequence
                        AND v_recent[i + 1] = v_last_sequence THEN
                        v_original := v_recent[i + 2];
                    END IF;
                END LOOP;
                IF v_original IS NULL THEN
                    errors[batch.n] := 45;
                ELSE
                    base_offsets[batch.n] := v_original;
                END IF;
                CONTINUE;
            END IF;
            v_epoch := batch.epoch;
            IF cardinality(v_recent) >= 15 THEN
                v_recent := v_recent[cardinality(v_recent) - 11:];
            END IF;
            v_recent := v_recent || ARRAY[batch.sequence, v_last_sequence, v_next_offset];
            IF NOT v_known THEN
                v_known := true;
                p_topics := p_topics || v_topic;
                p_parts := p_parts || v_part;
                p_ids := p_ids || v_producer;
                p_epochs := p_epochs || v_epoch;
                p_recents := p_recents || v_recent::text;
            ELSE
                p_epochs[cardinality(p_epochs)] := v_epoch;
                p_recents[cardinality(p_recents)] := v_recent::text;
            END IF;
        END IF;
        accepted[batch.n] := true;
        base_offsets[batch.n] := v_next_offset;
        v_next_offset := v_next_offset + batch.records;
    END LOOP;

    WITH taken AS (
        SELECT b.*, b.position IS DISTINCT FROM lag(b.position + b.size) OVER (
            PARTITION BY b.topic_id, b.part ORDER BY b.base_offset) AS begins
        FROM unnest(a_topics, a_partitions, a_records, a_positions, a_sizes,
                    a_max_timestamps, base_offsets, accepted)
            AS b (topic_id, part, records, position, size, max_timestamp, base_offset,
                  accepted)
        WHERE b.accepted
    ), numbered AS (
        SELECT t.*, count(*) FILTER (WHERE t.begins) OVER (
            PARTITION BY t.topic_id, t.part ORDER BY t.base_offset) AS run
        FROM taken AS t
    ), made AS (
        INSERT INTO mpbroker.extent
        SELECT t.topic_id, t.part, min(t.base_offset),
            max(t.base_offset + t.records - 1), a_key, min(t.position), sum(t.size),
            max(CASE WHEN t.max_timestamp = -1 THEN committed_ms
                ELSE t.max_timestamp END)
        FROM numbered AS t GROUP BY t.topic_id, t.part, t.run
        RETURNING 1
    ), moved AS (
        UPDATE mpbroker.partition_head AS h
        SET high_watermark = h.high_watermark + t.records, bytes = h.bytes + t.size
        FROM (SELECT x.topic_id, x.part, sum(x.records) AS records, sum(x.size) AS size
              FROM taken AS x GROUP BY x.topic_id, x.part) AS t
        WHERE h.topic_id = t.topic_id AND h.part = t.part
    )
    UPDATE mpbroker.object AS o
    SET state = 'l', changed = clock_timestamp(), bytes = a_bytes,
        live_extents = (SELECT count(*) FROM made),
        base_offsets = commit_object_v1.base_offsets, errors = commit_object_v1.errors,
        committed_ms = commit_object_v1.committed_ms
    WHERE o.key = a_key;

    INSERT INTO mpbroker.producer
    SELECT p.topic_id, p.part, p.id, p.epoch, p.recent::bigint[], clock_timestamp()
    FROM unnest(p_topics, p_parts, p_ids, p_epochs, p_recents)
        AS p (topic_id, part, id, epoch, recent)
    ON CONFLICT (topic_id, part, producer_id) DO UPDATE
        SET epoch = EXCLUDED.epoch, recent = EXCLUDED.recent, seen = EXCLUDED.seen;
END $$;

-- Ask what became of an object whose writer has died: returns true if it is committed,
-- and makes it dead otherwise, so that a commit which is still on its way is refused.
CREATE FUNCTION mpbroker.settle_object_v1(a_key uuid) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    found_state "char";
BEGIN
    UPDATE mpbroker.object AS o
    SET state = CASE WHEN o.state = 'p' THEN 'd' ELSE o.state END,
        changed = CASE WHEN o.state = 'p' THEN clock_timestamp() ELSE o.changed END,
        repeated = o.repeated + 1
    WHERE o.key = a_key RETURNING o.state INTO found_state;
    RETURN coalesce(found_state = 'l', false);
END $$;
