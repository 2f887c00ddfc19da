-- Offsets of groups in transactions. One node coordinates all transactions, and has their
-- states in its own log. The nodes that have the groups keep the offsets of an open
-- transaction among the records of their shards. Both talk by these tables:
--
--     transaction_question   may this producer commit offsets in this shard now?
--     transaction_end        a transaction that has offsets in a shard was decided

-- The process that writes ends. Each begins with a higher epoch.
CREATE TABLE mpbroker.transaction_coordinator (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    epoch bigint NOT NULL DEFAULT 0
);
INSERT INTO mpbroker.transaction_coordinator DEFAULT VALUES;

CREATE TABLE mpbroker.transaction_question (
    id uuid PRIMARY KEY,
    transactional_id bytea NOT NULL,  -- UTF-8; text cannot hold every id
    producer_id bigint NOT NULL,
    producer_epoch int NOT NULL,
    shard int NOT NULL,
    adds boolean NOT NULL,  -- whether the question adds the shard to the transaction
    asked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    answer int              -- Kafka's error code; 0: it may
);
CREATE INDEX ON mpbroker.transaction_question (asked_at);

-- A row stays until the owner of the shard has written what it means.
CREATE TABLE mpbroker.transaction_end (
    shard int,
    producer_id bigint,
    -- Another one for each row, so that a late deletion does not hit a later row.
    serial bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    producer_epoch int NOT NULL,
    is_commit boolean NOT NULL,
    PRIMARY KEY (shard, producer_id)
);

-- Begin to write ends; returns the epoch, null if the node has been started again. What
-- was sent in an earlier epoch is committed before that, or is refused.
CREATE FUNCTION mpbroker.fence_transaction_ends_v1(a_id int, a_epoch bigint)
RETURNS bigint LANGUAGE sql AS $$
    UPDATE mpbroker.transaction_coordinator AS c SET epoch = c.epoch + 1
    WHERE EXISTS (SELECT 1 FROM mpbroker.node AS o
                  WHERE o.id = a_id AND o.epoch = a_epoch)
    RETURNING c.epoch
$$;

-- Write ends; false: the epoch is not the current one, and nothing is written. An end
-- that is there already stays. A call must not be repeated in the same epoch: the first
-- one may come late, when the end is done and the producer's next transaction is open.
CREATE FUNCTION mpbroker.put_transaction_ends_v1(
    a_epoch bigint, a_shards int[], a_producers bigint[], a_epochs int[],
    a_commits boolean[])
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM mpbroker.transaction_coordinator AS c
    WHERE c.epoch = a_epoch FOR SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO mpbroker.transaction_end (shard, producer_id, producer_epoch, is_commit)
    SELECT * FROM unnest(a_shards, a_producers, a_epochs, a_commits)
    ON CONFLICT DO NOTHING;
    RETURN true;
END $$;

-- The ends that shards have still to write.
CREATE FUNCTION mpbroker.transaction_ends_v1(a_shards int[])
RETURNS TABLE (serial bigint, shard int, producer_id bigint, producer_epoch int,
               is_commit boolean)
LANGUAGE sql STABLE AS $$
    SELECT e.serial, e.shard, e.producer_id, e.producer_epoch, e.is_commit
    FROM mpbroker.transaction_end AS e WHERE e.shard = ANY (a_shards)
    ORDER BY e.serial
$$;

-- All ends that are not written yet.
CREATE FUNCTION mpbroker.open_transaction_ends_v1()
RETURNS TABLE (shard int, producer_id bigint) LANGUAGE sql STABLE AS $$
    SELECT e.shard, e.producer_id FROM mpbroker.transaction_end AS e
$$;

-- Note that a shard has written ends.
CREATE FUNCTION mpbroker.drop_transaction_ends_v1(a_serials bigint[])
RETURNS void LANGUAGE sql AS $$
    DELETE FROM mpbroker.transaction_end AS e WHERE e.serial = ANY (a_serials)
$$;

CREATE FUNCTION mpbroker.ask_transactions_v1(
    a_ids uuid[], a_transactional_ids bytea[], a_producers bigint[], a_epochs int[],
    a_shards int[], a_adds boolean[])
RETURNS void LANGUAGE sql AS $$
    INSERT INTO mpbroker.transaction_question
        (id, transactional_id, producer_id, producer_epoch, shard, adds)
    SELECT * FROM unnest(a_ids, a_transactional_ids, a_producers, a_epochs, a_shards,
                         a_adds)
    ON CONFLICT DO NOTHING
$$;

-- The questions without an answer. Those that nobody waits for any more are deleted.
CREATE FUNCTION mpbroker.transaction_questions_v1()
RETURNS TABLE (id uuid, transactional_id bytea, producer_id bigint, producer_epoch int,
               shard int, adds boolean)
LANGUAGE sql AS $$
    DELETE FROM mpbroker.transaction_question AS q
    WHERE q.asked_at < clock_timestamp() - interval '1 minute';
    SELECT q.id, q.transactional_id, q.producer_id, q.producer_epoch, q.shard, q.adds
    FROM mpbroker.transaction_question AS q WHERE q.answer IS NULL ORDER BY q.asked_at
$$;

CREATE FUNCTION mpbroker.answer_transactions_v1(a_ids uuid[], a_answers int[])
RETURNS void LANGUAGE sql AS $$
    UPDATE mpbroker.transaction_question AS q SET answer = a.answer
    FROM unnest(a_ids, a_answers) AS a (id, answer)
    WHERE q.id = a.id AND q.answer IS NULL
$$;

-- The answers to questions; deletes those whose answers are known.
CREATE FUNCTION mpbroker.transaction_answers_v1(a_ids uuid[], a_known uuid[])
RETURNS TABLE (id uuid, answer int) LANGUAGE sql AS $$
    DELETE FROM mpbroker.transaction_question AS q WHERE q.id = ANY (a_known);
    SELECT q.id, q.answer FROM mpbroker.transaction_question AS q
    WHERE q.id = ANY (a_ids) AND q.answer IS NOT NULL
$$;
