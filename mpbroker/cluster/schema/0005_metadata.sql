-- The metadata of a cluster: one log for all nodes, of which each keeps a copy.

CREATE TABLE mpbroker.metadata_head (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    end_offset bigint NOT NULL DEFAULT 0
);
INSERT INTO mpbroker.metadata_head DEFAULT VALUES;

CREATE TABLE mpbroker.metadata_record (
    log_offset bigint PRIMARY KEY,
    request uuid NOT NULL,  -- the append that brought it
    record bytea NOT NULL
);

-- Append records if the log still ends where the caller has read to. Returns the new end;
-- -1: others have appended, the caller reads on and decides again. A repeated call is
-- answered as the first time.
CREATE FUNCTION mpbroker.append_metadata_v1(
    a_request uuid, a_expected_end bigint, a_records bytea[])
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_end bigint;
BEGIN
    SELECT h.end_offset INTO v_end FROM mpbroker.metadata_head AS h FOR UPDATE;
    IF v_end <> a_expected_end THEN
        PERFORM 1 FROM mpbroker.metadata_record AS r
        WHERE r.log_offset = a_expected_end AND r.request = a_request;
        IF NOT FOUND THEN
            RETURN -1;
        END IF;
        -- As in commit_object_v1: the answer waits for the standby.
        UPDATE mpbroker.metadata_head AS h SET end_offset = h.end_offset;
        RETURN a_expected_end + cardinality(a_records);
    END IF;
    INSERT INTO mpbroker.metadata_record (log_offset, request, record)
    SELECT a_expected_end + x.n - 1, a_request, x.record
    FROM unnest(a_records) WITH ORDINALITY AS x (record, n);
    UPDATE mpbroker.metadata_head AS h
    SET end_offset = a_expected_end + cardinality(a_records);
    RETURN a_expected_end + cardinality(a_records);
END $$;

-- The records from an offset on, without a gap.
CREATE FUNCTION mpbroker.read_metadata_v1(a_from bigint, a_limit int)
RETURNS TABLE (log_offset bigint, record bytea) LANGUAGE sql STABLE AS $$
    SELECT r.log_offset, r.record FROM mpbroker.metadata_record AS r
    WHERE r.log_offset >= a_from ORDER BY r.log_offset LIMIT a_limit
$$;
