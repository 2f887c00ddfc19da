/* Readers of a request's fields and writers of an answer's fields, for versions with
 * and without compact lengths and tagged fields ("flexible" versions, KIP-482).
 */

#ifndef MPBROKER_REQUEST_FIELDS_H
#define MPBROKER_REQUEST_FIELDS_H

#include "base/big_endian.h"
#include "base/python_objects.h"
#include "protocol/varint.h"

#include <string.h>

/* A reader of bytes that a client has sent. If a field is cut off, or is of a kind that
 * the core does not read, `is_bad` is set; all fields read later are 0, and the request
 * is left to Python. */
typedef struct {
    cursor bytes;
    int is_flexible, is_bad;
} field_reader;

static inline field_reader
read_fields(const uint8_t *body, int64_t size, int is_flexible)
{
    return (field_reader){{body, body + size}, is_flexible, 0};
}

static inline int64_t
get_int(field_reader *r, int bytes)
{
    if (r->bytes.end - r->bytes.at < bytes) {
        r->is_bad = 1;
        return 0;
    }
    r->bytes.at += bytes;
    return read_big(r->bytes.at - bytes, bytes);
}

/* Read a length or count (in a flexible version it is sent plus 1); -1: null. */
static inline int64_t
get_length(field_reader *r, int bytes)
{
    uint64_t raw;
    if (!r->is_flexible)
        return get_int(r, bytes);
    if (!read_unsigned_varint(&r->bytes, 28, &raw)) { /* no frame has 256 MB */
        r->is_bad = 1;
        return 0;
    }
    return (int64_t)raw - 1;
}

static inline int64_t
get_array_length(field_reader *r)
{
    return get_length(r, 4);
}

static inline const uint8_t *
get_bytes(field_reader *r, int64_t length)
{
    if (length < 0 || length > r->bytes.end - r->bytes.at) {
        r->is_bad = 1;
        return NULL;
    }
    r->bytes.at += length;
    return r->bytes.at - length;
}

/* Read a string that is not null. */
static inline const uint8_t *
get_string(field_reader *r, int *length)
{
    int64_t size = get_length(r, 2);
    *length = (int)size;
    return get_bytes(r, size);
}

/* Read an empty section of tagged fields; the core knows no tagged fields. */
static inline void
get_no_tagged_fields(field_reader *r)
{
    if (r->is_flexible && get_int(r, 1) != 0)
        r->is_bad = 1;
}

static inline int
is_read_whole(const field_reader *r)
{
    return !r->is_bad && r->bytes.at == r->bytes.end;
}

/* Write a length or count as an integer of `bytes` bytes or, in a flexible version, as
 * a varint; -1: null. */
static inline uint8_t *
write_length(uint8_t *at, int64_t value, int is_flexible, int bytes)
{
    return is_flexible ? write_unsigned_varint(at, (uint64_t)value + 1)
                       : write_big(at, value, bytes);
}

/* Write an empty section of tagged fields, if the version is flexible. */
static inline uint8_t *
write_no_tagged_fields(uint8_t *at, int is_flexible)
{
    if (is_flexible)
        *at++ = 0;
    return at;
}

/* -- topics ------------------------------------------------------------------------ */

/* From this version on Produce and Fetch requests name topics by id. */
#define TOPIC_IDS_FROM 13
#define TOPIC_ID_BYTES 16

/* A topic of a request: its name or its id, and its partitions: `count` of the
 * request's partitions, from index `first` on. */
typedef struct {
    const uint8_t *name;
    int name_bytes, first, count;
} request_topic;

static inline void
get_topic_name(field_reader *r, int version, request_topic *topic)
{
    if (version < TOPIC_IDS_FROM)
        topic->name = get_string(r, &topic->name_bytes);
    else
        topic->name = get_bytes(r, topic->name_bytes = TOPIC_ID_BYTES);
}

/* Write the fields of a topic that come before its partitions in an answer: its name or
 * id, and the number of partitions. */
static inline uint8_t *
write_topic(uint8_t *at, int version, const request_topic *topic, int is_flexible)
{
    if (version < TOPIC_IDS_FROM)
        at = write_length(at, topic->name_bytes, is_flexible, 2);
    memcpy(at, topic->name, topic->name_bytes);
    return write_length(at + topic->name_bytes, topic->count, is_flexible, 4);
}

/* Return the key of a topic in the tables: its name as a str, or its id as bytes. NULL,
 * without an exception, if the name is not UTF-8: Python reads and answers such a
 * request. */
static inline PyObject *
topic_key(const request_topic *topic, int version)
{
    const char *text = (const char *)topic->name;
    PyObject *key = version < TOPIC_IDS_FROM
                        ? PyUnicode_DecodeUTF8(text, topic->name_bytes, NULL)
                        : PyBytes_FromStringAndSize(text, topic->name_bytes);
    if (key == NULL)
        PyErr_Clear();
    return key;
}

#endif
