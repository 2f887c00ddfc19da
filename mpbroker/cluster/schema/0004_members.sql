-- The nodes of a cluster and their leases, which only this database's clock decides on;
-- and the shards: parts of the cluster's work that one node at a time does.

CREATE SEQUENCE mpbroker.node_epoch;

CREATE TABLE mpbroker.node (
    id int PRIMARY KEY,              -- node.id
    directory uuid NOT NULL UNIQUE,  -- says that a node which comes back is the same
    epoch bigint NOT NULL,           -- a new one for each start
    rack text,
    listeners text[] NOT NULL,
    version text NOT NULL,
    lease_until timestamptz NOT NULL
);

CREATE TABLE mpbroker.shard (
    kind text,
    n int,
    node int,
    node_epoch bigint,
    epoch int NOT NULL DEFAULT 0,  -- raised with every owner
    PRIMARY KEY (kind, n)
);

-- One for each partition of __consumer_offsets (offsets.topic.num.partitions).
INSERT INTO mpbroker.shard (kind, n) SELECT 'group', n FROM generate_series(0, 49) AS n;

-- Join the cluster. A directory keeps its id; a new one gets the id that it asks for, or
-- (a_id is null) the next one above 1000, as Kafka gives out ids. An id whose lease has
-- ended may be taken over by a new directory: nothing is lost with a node.
-- Raises MP002: the text says what to do.
CREATE FUNCTION mpbroker.join_node_v1(
    a_directory uuid, a_id int, a_rack text, a_listeners text[], a_version text,
    a_lease interval, OUT id int, OUT epoch bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_node mpbroker.node;
BEGIN
    PERFORM 1 FROM mpbroker.cluster FOR UPDATE;  -- one after the other
    SELECT * INTO v_node FROM mpbroker.node AS o WHERE o.directory = a_directory;
    IF FOUND THEN
        IF a_id <> v_node.id THEN
            RAISE EXCEPTION 'the directories of this broker belong to node %, not %: set node.id=%, or name other log.dirs',
                v_node.id, a_id, v_node.id USING ERRCODE = 'MP002';
        END IF;
        id := v_node.id;
    ELSIF a_id IS NULL THEN
        SELECT greatest(max(o.id), 1000) + 1 INTO id FROM mpbroker.node AS o;
    ELSE
        id := a_id;
        SELECT * INTO v_node FROM mpbroker.node AS o WHERE o.id = a_id;
        IF FOUND AND v_node.lease_until > clock_timestamp() THEN
            RAISE EXCEPTION 'node % is running with other directories (%): set another node.id',
                a_id, array_to_string(v_node.listeners, ', ') USING ERRCODE = 'MP002';
        END IF;
    END IF;
    epoch := nextval('mpbroker.node_epoch');
    DELETE FROM mpbroker.node AS o WHERE o.id = join_node_v1.id;
    INSERT INTO mpbroker.node (id, directory, epoch, rack, listeners, version, lease_until)
    VALUES (join_node_v1.id, a_directory, join_node_v1.epoch, a_rack, a_listeners,
            a_version, clock_timestamp() + a_lease);
END $$;

-- Renew a lease; false: the id was taken over, or its node has been started again.
CREATE FUNCTION mpbroker.renew_node_v1(a_id int, a_epoch bigint, a_lease interval)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE mpbroker.node AS o SET lease_until = clock_timestamp() + a_lease
    WHERE o.id = a_id AND o.epoch = a_epoch;
    RETURN FOUND;
END $$;

-- End a lease: others may take the node's shards at once.
CREATE FUNCTION mpbroker.leave_node_v1(a_id int, a_epoch bigint) RETURNS void
LANGUAGE sql AS $$
    UPDATE mpbroker.node AS o SET lease_until = clock_timestamp()
    WHERE o.id = a_id AND o.epoch = a_epoch
$$;

CREATE FUNCTION mpbroker.nodes_v1()
RETURNS TABLE (id int, epoch bigint, rack text, listeners text[], version text,
               is_live boolean, shards bigint)
LANGUAGE sql STABLE AS $$
    SELECT o.id, o.epoch, o.rack, o.listeners, o.version,
        o.lease_until > clock_timestamp(),
        (SELECT count(*) FROM mpbroker.shard AS s
         WHERE s.node = o.id AND s.node_epoch = o.epoch)
    FROM mpbroker.node AS o ORDER BY o.id
$$;

-- Take shards that no live node has, up to a node's share; returns all that it has, none
-- without a lease. Those above its share have keep = false: the node stops its work with
-- them, and then releases them.
CREATE FUNCTION mpbroker.take_shards_v1(a_kind text, a_id int, a_epoch bigint)
RETURNS TABLE (n int, epoch int, keep boolean) LANGUAGE plpgsql AS $$
DECLARE
    v_live int;
    v_share int;
    v_own int;
BEGIN
    SELECT count(*) INTO v_live FROM mpbroker.node AS o
    WHERE o.lease_until > clock_timestamp();
    IF NOT EXISTS (SELECT 1 FROM mpbroker.node AS o WHERE o.id = a_id
                   AND o.epoch = a_epoch AND o.lease_until > clock_timestamp()) THEN
        RETURN;
    END IF;
    SELECT ceil(count(*) / v_live::numeric),
        count(*) FILTER (WHERE s.node = a_id AND s.node_epoch = a_epoch)
    INTO v_share, v_own FROM mpbroker.shard AS s WHERE s.kind = a_kind;
    UPDATE mpbroker.shard AS s
    SET node = a_id, node_epoch = a_epoch, epoch = s.epoch + 1
    FROM (SELECT x.n FROM mpbroker.shard AS x
          WHERE x.kind = a_kind AND NOT EXISTS (
              SELECT 1 FROM mpbroker.node AS o WHERE o.id = x.node
              AND o.epoch = x.node_epoch AND o.lease_until > clock_timestamp())
          ORDER BY x.n LIMIT greatest(0, v_share - v_own)
          FOR UPDATE OF x SKIP LOCKED) AS free
    WHERE s.kind = a_kind AND s.n = free.n;
    RETURN QUERY
    SELECT s.n, s.epoch, row_number() OVER (ORDER BY s.n) <= v_share
    FROM mpbroker.shard AS s
    WHERE s.kind = a_kind AND s.node = a_id AND s.node_epoch = a_epoch ORDER BY s.n;
END $$;

-- Release shards; those that another node has by now stay there.
CREATE FUNCTION mpbroker.release_shards_v1(
    a_kind text, a_numbers int[], a_id int, a_epoch bigint)
RETURNS void LANGUAGE sql AS $$
    UPDATE mpbroker.shard AS s SET node = NULL, node_epoch = NULL
    WHERE s.kind = a_kind AND s.n = ANY (a_numbers)
      AND s.node = a_id AND s.node_epoch = a_epoch
$$;
