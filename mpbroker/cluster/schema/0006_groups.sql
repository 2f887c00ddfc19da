-- The records of groups. Each shard has a part of the groups, and one node at a time has
-- the shard: it keeps the shard's records in memory, and alone writes them here.

CREATE TABLE mpbroker.group_record (
    shard int,
    -- The id of a group, which is in the key, may be longer than what an index takes.
    key_hash bytea GENERATED ALWAYS AS (sha256(key)) STORED,
    key bytea NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (shard, key_hash)
) WITH (fillfactor = 70);  -- offsets are committed again and again: in their own pages

-- Take shards up to a node's share; returns all that it has, and for how much longer it
-- has its lease; none without a lease. Those above its share have keep = false: the node
-- stops its work with them, and then releases them.
--
-- As take_shards_v1, but what an earlier epoch of a node had is free for that node only,
-- as long as the node has a lease. The earlier epoch may still answer from its memory.
CREATE FUNCTION mpbroker.hold_shards_v1(a_kind text, a_id int, a_epoch bigint)
RETURNS TABLE (n int, epoch int, keep boolean, lease_left interval)
LANGUAGE plpgsql AS $$
DECLARE
    v_until timestamptz;
    v_share int;
    v_own int;
BEGIN
    SELECT o.lease_until INTO v_until FROM mpbroker.node AS o
    WHERE o.id = a_id AND o.epoch = a_epoch AND o.lease_until > clock_timestamp();
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT ceil(count(*) / (SELECT greatest(1, count(*)) FROM mpbroker.node AS o
                            WHERE o.lease_until > clock_timestamp())::numeric),
        count(*) FILTER (WHERE s.node = a_id)
    INTO v_share, v_own FROM mpbroker.shard AS s WHERE s.kind = a_kind;
    -- A shard whose row is locked has a transaction of its owner on the way: next time.
    UPDATE mpbroker.shard AS s
    SET node_epoch = a_epoch, epoch = s.epoch + 1
    FROM (SELECT x.n FROM mpbroker.shard AS x
          WHERE x.kind = a_kind AND x.node = a_id AND x.node_epoch < a_epoch
          ORDER BY x.n FOR UPDATE OF x SKIP LOCKED) AS own
    WHERE s.kind = a_kind AND s.n = own.n;
    UPDATE mpbroker.shard AS s
    SET node = a_id, node_epoch = a_epoch, epoch = s.epoch + 1
    FROM (SELECT x.n FROM mpbroker.shard AS x
          WHERE x.kind = a_kind AND NOT EXISTS (
              SELECT 1 FROM mpbroker.node AS o
              WHERE o.id = x.node AND o.lease_until > clock_timestamp())
          ORDER BY x.n LIMIT greatest(0, v_share - v_own)
          FOR UPDATE OF x SKIP LOCKED) AS free
    WHERE s.kind = a_kind AND s.n = free.n;
    RETURN QUERY
    SELECT s.n, s.epoch, row_number() OVER (ORDER BY s.n) <= v_share,
        v_until - clock_timestamp()
    FROM mpbroker.shard AS s
    WHERE s.kind = a_kind AND s.node = a_id AND s.node_epoch = a_epoch ORDER BY s.n;
END $$;

-- Raise the epochs of shards that a node has; returns those. What the node has sent for
-- an earlier epoch is committed before that, or is refused.
CREATE FUNCTION mpbroker.fence_shards_v1(
    a_kind text, a_numbers int[], a_id int, a_epoch bigint)
RETURNS TABLE (n int, epoch int) LANGUAGE sql AS $$
    UPDATE mpbroker.shard AS s SET epoch = s.epoch + 1
    FROM (SELECT x.n FROM mpbroker.shard AS x
          WHERE x.kind = a_kind AND x.n = ANY (a_numbers)
            AND x.node = a_id AND x.node_epoch = a_epoch
          ORDER BY x.n FOR UPDATE OF x) AS own
    WHERE s.kind = a_kind AND s.n = own.n
    RETURNING s.n, s.epoch
$$;

-- Write records of shards, each key once; a value that is null deletes its key. Returns
-- the shards that the node does not have in these epochs, of which nothing is written.
--
-- One call is one transaction. It may be repeated, but not by an epoch that has written
-- something else since: see fence_shards_v1.
CREATE FUNCTION mpbroker.put_group_records_v1(
    a_id int, a_epoch bigint, a_shards int[], a_shard_epochs int[],
    a_record_shards int[], a_keys bytea[], a_values bytea[])
RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
    v_own int[];
BEGIN
    -- Locked to the end: no other node takes a shard between this look and the commit.
    SELECT array_agg(x.n) INTO v_own
    FROM (SELECT s.n FROM mpbroker.shard AS s
          JOIN unnest(a_shards, a_shard_epochs) AS w (n, epoch) ON w.n = s.n
          WHERE s.kind = 'group' AND s.node = a_id AND s.node_epoch = a_epoch
            AND s.epoch = w.epoch
          ORDER BY s.n FOR SHARE OF s) AS x;
    IF NOT EXISTS (SELECT 1 FROM mpbroker.node AS o WHERE o.id = a_id
                   AND o.epoch = a_epoch AND o.lease_until > clock_timestamp()) THEN
        RETURN a_shards;
    END IF;
    INSERT INTO mpbroker.group_record AS g (shard, key, value)
    SELECT r.shard, r.key, r.value
    FROM unnest(a_record_shards, a_keys, a_values) AS r (shard, key, value)
    WHERE r.value IS NOT NULL AND r.shard = ANY (v_own)
    ON CONFLICT (shard, key_hash) DO UPDATE SET value = EXCLUDED.value;
    DELETE FROM mpbroker.group_record AS g
    USING unnest(a_record_shards, a_keys, a_values) AS r (shard, key, value)
    WHERE r.value IS NULL AND r.shard = ANY (v_own)
      AND g.shard = r.shard AND g.key_hash = sha256(r.key);
    RETURN (SELECT coalesce(array_agg(w.n), '{}') FROM unnest(a_shards) AS w (n)
            WHERE w.n <> ALL (coalesce(v_own, '{}')));
END $$;

-- Copy records from a broker that becomes a node, and has groups. What is there stays.
CREATE FUNCTION mpbroker.adopt_group_records_v1(
    a_shards int[], a_keys bytea[], a_values bytea[])
RETURNS void LANGUAGE sql AS $$
    INSERT INTO mpbroker.group_record (shard, key, value)
    SELECT r.shard, r.key, r.value
    FROM unnest(a_shards, a_keys, a_values) AS r (shard, key, value)
    ON CONFLICT DO NOTHING
$$;

-- The records of a shard behind a hash, in the order of hashes: at most so many rows and
-- bytes, but one at least.
CREATE FUNCTION mpbroker.group_records_v1(
    a_shard int, a_after bytea, a_rows int, a_bytes bigint)
RETURNS TABLE (key_hash bytea, key bytea, value bytea) LANGUAGE sql STABLE AS $$
    SELECT x.key_hash, x.key, x.value
    FROM (SELECT g.*, sum(octet_length(g.key) + octet_length(g.value))
              OVER (ORDER BY g.key_hash) - octet_length(g.key)
              - octet_length(g.value) AS before
          FROM (SELECT * FROM mpbroker.group_record AS y
                WHERE y.shard = a_shard AND y.key_hash > a_after
                ORDER BY y.key_hash LIMIT a_rows) AS g) AS x
    WHERE x.before < a_bytes ORDER BY x.key_hash
$$;

-- The nodes that have a lease, and the shards that each of them has.
CREATE FUNCTION mpbroker.live_nodes_v1(a_kind text)
RETURNS TABLE (id int, rack text, listeners text[], shards int[])
LANGUAGE sql STABLE AS $$
    SELECT o.id, o.rack, o.listeners,
        ARRAY(SELECT s.n FROM mpbroker.shard AS s
              WHERE s.kind = a_kind AND s.node = o.id AND s.node_epoch = o.epoch
              ORDER BY s.n)
    FROM mpbroker.node AS o
    WHERE o.lease_until > clock_timestamp() ORDER BY o.id
$$;
