-- Have the nodes that have some shards read their records again: others have written
-- there. Such a node finds the higher epochs, and loses the shards and takes them again;
-- what it has sent before is committed by then, or is refused.
CREATE FUNCTION mpbroker.reload_shards_v1(a_kind text, a_numbers int[])
RETURNS void LANGUAGE sql AS $$
    UPDATE mpbroker.shard AS s SET epoch = s.epoch + 1
    FROM (SELECT x.n FROM mpbroker.shard AS x
          WHERE x.kind = a_kind AND x.n = ANY (a_numbers)
          ORDER BY x.n FOR UPDATE OF x) AS locked
    WHERE s.kind = a_kind AND s.n = locked.n
$$;
