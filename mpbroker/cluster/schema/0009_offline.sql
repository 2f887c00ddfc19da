-- The partitions that a node has and cannot serve: their log directory has failed, or was
-- not there at the node's start. A node that joins has none until it tells of them.

ALTER TABLE mpbroker.node
    ADD COLUMN offline text NOT NULL DEFAULT '',            -- JSON, see offline_partitions.py
    ADD COLUMN offline_version bigint NOT NULL DEFAULT 0;  -- another one for each change

-- Tell the cluster which partitions of a node are offline; an epoch that has ended tells
-- nothing.
CREATE FUNCTION mpbroker.tell_offline_v1(a_id int, a_epoch bigint, a_offline text)
RETURNS void LANGUAGE sql AS $$
    UPDATE mpbroker.node AS o
    SET offline = a_offline, offline_version = nextval('mpbroker.node_epoch')
    WHERE o.id = a_id AND o.epoch = a_epoch AND o.offline <> a_offline
$$;

-- The partitions of some nodes that are offline.
CREATE FUNCTION mpbroker.offline_v1(a_ids int[])
RETURNS TABLE (id int, offline text) LANGUAGE sql STABLE AS $$
    SELECT o.id, o.offline FROM mpbroker.node AS o WHERE o.id = ANY (a_ids)
$$;

-- As live_nodes_v1, and a number for each node that changes when other partitions of it
-- are offline than before; 0: none has been since it joined.
CREATE FUNCTION mpbroker.live_nodes_v2(a_kind text)
RETURNS TABLE (id int, rack text, listeners text[], shards int[], offline_version bigint)
LANGUAGE sql STABLE AS $$
    SELECT o.id, o.rack, o.listeners,
        ARRAY(SELECT s.n FROM mpbroker.shard AS s
              WHERE s.kind = a_kind AND s.node = o.id AND s.node_epoch = o.epoch
              ORDER BY s.n),
        o.offline_version
    FROM mpbroker.node AS o
    WHERE o.lease_until > clock_timestamp() ORDER BY o.id
$$;
