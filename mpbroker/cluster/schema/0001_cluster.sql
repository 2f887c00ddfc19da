-- The cluster that a database belongs to, and the migrations that it has had.

CREATE SCHEMA mpbroker;

CREATE TABLE mpbroker.migration (
    version int PRIMARY KEY,
    name text NOT NULL,
    applied timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE mpbroker.cluster (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    id text NOT NULL,           -- cluster.id of Metadata and meta.properties
    storage_url text NOT NULL,  -- where the bytes are
    -- The oldest version of this schema that a node may be written for. A migration that
    -- older nodes cannot live with raises it; all others leave it as it is.
    usable_from int NOT NULL DEFAULT 1,
    created timestamptz NOT NULL DEFAULT now()
);
