/* The walk over the records of an uncompressed batch: the only one in C.
 *
 * The validation of producers' batches, the columns for readers and the log cleaner all
 * use read_record(). It is a static function with constants for arguments, so the
 * compiler makes a version for each use, with only the code that this use needs. No
 * byte is read before it is known to be in the buffer.
 *
 * The specification is walk_records_in_python() in protocol/records/record_walk.py: the
 * same faults, in the same order, for the same bytes
 * (tests/protocol/test_record_walk.py).
 *
 * Source: Kafka protocol guide, "Record".
 */

#ifndef MPBROKER_RECORD_WALK_H
#define MPBROKER_RECORD_WALK_H

#include "protocol/varint.h"

#include <stddef.h>

/* Numbered as in record_walk.py. */
enum record_fault {
    NO_FAULT = 0,
    TOO_FEW_RECORDS = 1,
    BAD_VARINT = 2,
    BAD_RECORD_LENGTH = 3,
    BAD_OFFSET_DELTA = 4,
    BAD_KEY_LENGTH = 5,
    BAD_VALUE_LENGTH = 6,
    BAD_HEADER_COUNT = 7,
    BAD_HEADER = 8,
    BYTES_LEFT_IN_RECORD = 9,
    BYTES_LEFT_IN_BATCH = 10,
};

/* Attributes, two deltas, two lengths and a header count, of one byte each. */
#define MIN_RECORD_LENGTH 6

typedef struct {
    const uint8_t *data; /* NULL: null */
    int64_t length;
} record_field;

typedef struct {
    int64_t timestamp_delta;
    int64_t offset_delta;
    record_field key;
    record_field value;
    int64_t header_count;
    cursor headers; /* for header_count calls of read_record_header() */
} record;

/* Read a length, and as many bytes as it says. */
static inline enum record_fault
read_record_field(cursor *c, enum record_fault bad_length, record_field *field)
{
    int64_t length;
    *field = (record_field){NULL, 0};
    if (!read_varint(c, 32, &length))
        return BAD_VARINT;
    if (length < 0)
        return length == -1 ? NO_FAULT : bad_length;
    if (length > c->end - c->at)
        return bad_length;
    *field = (record_field){c->at, length};
    c->at += length;
    return NO_FAULT;
}

/* Read a header. Its value may be null, but not its name. */
static inline enum record_fault
read_record_header(cursor *c, record_field *name, record_field *value)
{
    enum record_fault fault = read_record_field(c, BAD_HEADER, name);
    if (fault != NO_FAULT)
        return fault;
    return name->data == NULL ? BAD_HEADER : read_record_field(c, BAD_HEADER, value);
}

/* Read all headers of a record. */
static inline enum record_fault
read_headers(cursor *c, record *r)
{
    r->header_count = 0;
    r->headers = *c;
    if (c->at < c->end && *c->at == 0) {
        c->at++; /* no headers, as in nearly all records */
        return NO_FAULT;
    }
    if (!read_varint(c, 32, &r->header_count))
        return BAD_VARINT;
    if (r->header_count < 0 || r->header_count > c->end - c->at)
        return BAD_HEADER_COUNT;
    r->headers = *c;
    for (int64_t left = r->header_count; left > 0; left--) {
        record_field name, value;
        enum record_fault fault = read_record_header(c, &name, &value);
        if (fault != NO_FAULT)
            return fault;
    }
    return NO_FAULT;
}

/* Read the next record of a batch. `has_gaps`, a constant: the record's offset delta
 * may differ from its index, as in batches that were compacted. */
static inline enum record_fault
read_record(cursor *batch, int has_gaps, int64_t index, record *r)
{
    int64_t length;
    enum record_fault fault;
    if (batch->at == batch->end)
        return TOO_FEW_RECORDS;
    if (!read_varint(batch, 32, &length))
        return BAD_VARINT;
    if (length < MIN_RECORD_LENGTH || length > batch->end - batch->at)
        return BAD_RECORD_LENGTH;
    cursor c = {batch->at + 1, batch->at + length}; /* past the attributes */
    batch->at = c.end;
    if (!read_varint(&c, 64, &r->timestamp_delta)
        || !read_varint(&c, 32, &r->offset_delta))
        return BAD_VARINT;
    if (!has_gaps && r->offset_delta != index)
        return BAD_OFFSET_DELTA;
    fault = read_record_field(&c, BAD_KEY_LENGTH, &r->key);
    if (fault == NO_FAULT)
        fault = read_record_field(&c, BAD_VALUE_LENGTH, &r->value);
    if (fault != NO_FAULT)
        return fault;
    fault = read_headers(&c, r);
    if (fault != NO_FAULT)
        return fault;
    return c.at == c.end ? NO_FAULT : BYTES_LEFT_IN_RECORD;
}

#endif
