/* Python twins: protocol/fast_produce.py and protocol/messages/produce.py. */

#include "server/produce_request.h"

#define FIRST_VERSION 3
#define LAST_VERSION 13
/* The largest numbers of bytes that parts of an answer take: its size field, header,
 * counts and throttle time; a topic without its name; a partition. */
#define HEAD_ROOM 24
#define TOPIC_ROOM 8
#define PARTITION_ROOM 36

static void
parse_partition(field_reader *r, produce_partition *part)
{
    part->index = (int)get_int(r, 4);
    part->batch_bytes = get_array_length(r);
    part->batch = (uint8_t *)get_bytes(r, part->batch_bytes);
    get_no_tagged_fields(r);
}

static void
parse_topic(field_reader *r, produce_request *p)
{
    request_topic *topic = &p->topics[p->topic_count++];
    get_topic_name(r, p->version, topic);
    int64_t count = get_array_length(r);
    if (count < 1 || count > MAX_PRODUCE_PARTITIONS - p->partition_count)
        r->is_bad = 1;
    topic->first = p->partition_count;
    topic->count = (int)count;
    for (int i = 0; !r->is_bad && i < topic->count; i++)
        parse_partition(r, &p->partitions[p->partition_count++]);
    get_no_tagged_fields(r);
}

/* Return whether the request has a transactional id. One that is not ASCII is left to
 * Python. */
static int
has_transactional_id(field_reader *r)
{
    int64_t length = get_length(r, 2);
    if (length == -1)
        return 0;
    const uint8_t *id = get_bytes(r, length);
    for (int64_t i = 0; !r->is_bad && i < length; i++)
        if (id[i] >= 0x80)
            r->is_bad = 1;
    return 1;
}

int
parse_produce_request(uint8_t *body, int64_t size, int version, produce_request *p)
{
    field_reader r = read_fields(body, size, version >= PRODUCE_FLEXIBLE_FROM);
    p->version = version;
    p->topic_count = p->partition_count = 0;
    if (version < FIRST_VERSION || version > LAST_VERSION)
        return 0;
    p->is_transactional = has_transactional_id(&r);
    p->acks = (int)get_int(&r, 2);
    get_int(&r, 4); /* the timeout: there is no replica to wait for */
    int64_t topics = get_array_length(&r);
    if (p->acks < -1 || p->acks > 1 || topics < 1 || topics > MAX_PRODUCE_PARTITIONS)
        return 0;
    for (; !r.is_bad && topics > 0; topics--)
        parse_topic(&r, p);
    get_no_tagged_fields(&r);
    return is_read_whole(&r);
}

int64_t
produce_answer_bound(const produce_request *p)
{
    int64_t bound = HEAD_ROOM + (int64_t)p->partition_count * PARTITION_ROOM;
    for (int i = 0; i < p->topic_count; i++)
        bound += TOPIC_ROOM + p->topics[i].name_bytes;
    return bound;
}

static uint8_t *
write_partition(uint8_t *at, const produce_partition *part, int version)
{
    const int is_flexible = version >= PRODUCE_FLEXIBLE_FROM;
    at = write_big(at, part->index, 4);
    at = write_big(at, 0, 2); /* no error */
    at = write_big(at, part->done.base_offset, 8);
    at = write_big(at, -1, 8); /* the topic keeps the producer's timestamps */
    if (version >= 5)
        at = write_big(at, part->log_start_offset, 8);
    if (version >= 8) {
        at = write_length(at, 0, is_flexible, 4);  /* no record errors */
        at = write_length(at, -1, is_flexible, 2); /* no message */
    }
    return write_no_tagged_fields(at, is_flexible);
}

uint8_t *
write_produce_answer(uint8_t *at, const produce_request *p)
{
    const int is_flexible = p->version >= PRODUCE_FLEXIBLE_FROM;
    at = write_length(at, p->topic_count, is_flexible, 4);
    for (int i = 0; i < p->topic_count; i++) {
        const request_topic *topic = &p->topics[i];
        at = write_topic(at, p->version, topic, is_flexible);
        for (int j = 0; j < topic->count; j++)
            at = write_partition(at, &p->partitions[topic->first + j], p->version);
        at = write_no_tagged_fields(at, is_flexible);
    }
    at = write_big(at, 0, 4); /* throttle time */
    return write_no_tagged_fields(at, is_flexible);
}
