/* Python twin: protocol/messages/fetch.py. */

#include "server/fetch_request.h"

#define FIRST_VERSION 4
#define LAST_VERSION 18
#define READ_COMMITTED 1
/* The largest numbers of bytes that parts of an answer take: the fields in front, a
 * topic without its name, a partition without its records. */
#define HEAD_ROOM 32
#define TOPIC_ROOM 16
#define PARTITION_ROOM 56

/* -- the request ------------------------------------------------------------------- */

static void
parse_partition(field_reader *r, int version, fetch_partition *part)
{
    part->index = (int)get_int(r, 4);
    part->leader_epoch = version >= 9 ? get_int(r, 4) : -1;
    part->offset = get_int(r, 8);
    if (version >= 12)
        get_int(r, 4); /* the last epoch that was fetched */
    if (version >= 5)
        get_int(r, 8); /* a follower's log start offset */
    part->max_bytes = get_int(r, 4);
    if (part->max_bytes < 0)
        r->is_bad = 1;
    get_no_tagged_fields(r);
}

static int
is_named_before(const fetch_request *f, const request_topic *topic)
{
    for (const request_topic *other = f->topics; other < topic; other++)
        if (other->name_bytes == topic->name_bytes
            && memcmp(other->name, topic->name, topic->name_bytes) == 0)
            return 1;
    return 0;
}

static void
parse_topic(field_reader *r, fetch_request *f)
{
    request_topic *topic = &f->topics[f->topic_count++];
    get_topic_name(r, f->version, topic);
    topic->first = f->partition_count;
    topic->count = (int)get_array_length(r);
    /* An answer names a topic once. If a request names it twice, Python puts the
     * partitions together. */
    if (!r->is_bad && is_named_before(f, topic))
        r->is_bad = 1;
    if (topic->count < 1 || topic->count > MAX_FETCH_PARTITIONS - f->partition_count)
        r->is_bad = 1;
    for (int i = 0; !r->is_bad && i < topic->count; i++)
        parse_partition(r, f->version, &f->partitions[f->partition_count++]);
    get_no_tagged_fields(r);
}

int
parse_fetch_request(const uint8_t *body, int64_t size, int version, fetch_request *f)
{
    field_reader r = read_fields(body, size, version >= FETCH_FLEXIBLE_FROM);
    f->version = version;
    f->topic_count = f->partition_count = 0;
    if (version < FIRST_VERSION || version > LAST_VERSION)
        return 0;
    if (version < 15)
        get_int(&r, 4); /* the replica's id */
    f->max_wait_ms = get_int(&r, 4);
    f->min_bytes = get_int(&r, 4);
    f->max_bytes = get_int(&r, 4);
    f->read_committed = get_int(&r, 1) == READ_COMMITTED;
    if (version >= 7 && (get_int(&r, 4) != 0 || get_int(&r, 4) != -1))
        return 0; /* the request belongs to a session */
    int64_t topics = get_array_length(&r);
    if (f->max_bytes < 0 || topics < 1 || topics > MAX_FETCH_TOPICS)
        return 0;
    for (; !r.is_bad && topics > 0; topics--)
        parse_topic(&r, f);
    if (version >= 7 && get_array_length(&r) != 0)
        return 0; /* it forgets topics, although it has no session */
    if (version >= 11) {
        int length;
        const uint8_t *rack = get_string(&r, &length);
        for (int i = 0; !r.is_bad && i < length; i++)
            if (rack[i] >= 0x80)
                return 0;
    }
    get_no_tagged_fields(&r);
    return is_read_whole(&r);
}

/* -- the answer -------------------------------------------------------------------- */

int64_t
fetch_answer_bound(const fetch_request *f)
{
    int64_t bound = HEAD_ROOM;
    for (int i = 0; i < f->topic_count; i++)
        bound += TOPIC_ROOM + f->topics[i].name_bytes;
    for (int i = 0; i < f->partition_count; i++)
        bound += PARTITION_ROOM + f->partitions[i].found.length;
    return bound;
}

/* Write a partition and its records; NULL if the file does not have all of them. */
static uint8_t *
write_partition(uint8_t *at, const fetch_request *f, const fetch_partition *part)
{
    const int is_flexible = f->version >= FETCH_FLEXIBLE_FROM;
    const read_region *found = &part->found;
    at = write_big(at, part->index, 4);
    at = write_big(at, 0, 2); /* no error */
    at = write_big(at, found->end_offset, 8);
    at = write_big(at, found->stable_offset, 8);
    if (f->version >= 5)
        at = write_big(at, found->log_start_offset, 8);
    /* Aborted transactions: there are none, or they were not asked for. */
    at = write_length(at, f->read_committed ? 0 : -1, is_flexible, 4);
    if (f->version >= 11)
        at = write_big(at, -1, 4); /* no other replica is preferred */
    at = write_length(at, found->length, is_flexible, 4);
    if (!read_records(found, at))
        return NULL;
    return write_no_tagged_fields(at + found->length, is_flexible);
}

uint8_t *
write_fetch_answer(uint8_t *at, const fetch_request *f)
{
    const int is_flexible = f->version >= FETCH_FLEXIBLE_FROM;
    at = write_big(at, 0, 4); /* throttle time */
    if (f->version >= 7) {
        at = write_big(at, 0, 2); /* no error */
        at = write_big(at, 0, 4); /* no session */
    }
    at = write_length(at, f->topic_count, is_flexible, 4);
    for (int i = 0; i < f->topic_count; i++) {
        const request_topic *topic = &f->topics[i];
        at = write_topic(at, f->version, topic, is_flexible);
        for (int j = 0; at != NULL && j < topic->count; j++)
            at = write_partition(at, f, &f->partitions[topic->first + j]);
        if (at == NULL)
            return NULL;
        at = write_no_tagged_fields(at, is_flexible);
    }
    return write_no_tagged_fields(at, is_flexible);
}
