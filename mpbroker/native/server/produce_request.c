/* A Produce request, and the answer to one that has succeeded whole.
 * The twins: protocol/fast_produce.py and protocol/messages/produce.py. What a client
 * may send, and this does not read, is left to them.
 */

#include "core.h"
#include "protocol/request_fields.h"

#include <string.h>

#define FIRST_VERSION 3
#define LAST_VERSION 13
#define FLEXIBLE_FROM 9
#define TOPIC_IDS_FROM 13
/* What an answer takes at most: its size, header, counts and throttle time; a topic
 * without its name; a partition. */
#define HEAD_ROOM 24
#define TOPIC_ROOM 8
#define PARTITION_ROOM 36

static void
parse_partition(reader *r, produce_part *part)
{
    part->partition = (int)get(r, 4);
    part->batch_bytes = get_count(r);
    part->batch = (uint8_t *)get_bytes(r, part->batch_bytes);
    get_no_tags(r);
}

static void
parse_topic(reader *r, plain_produce *p)
{
    request_topic *topic = &p->topics[p->topic_count++];
    if (p->version >= TOPIC_IDS_FROM)
        topic->name = get_bytes(r, topic->name_bytes = 16);
    else
        topic->name = get_string(r, &topic->name_bytes);
    int64_t count = get_count(r);
    if (count < 1 || count > MAX_PRODUCE_PARTS - p->part_count)
        r->is_bad = 1;
    topic->first = p->part_count;
    topic->count = (int)count;
    for (int i = 0; !r->is_bad && i < topic->count; i++)
        parse_partition(r, &p->parts[p->part_count++]);
    get_no_tags(r);
}

/* Whether there is one; only ASCII is plain. */
static int
has_transactional_id(reader *r)
{
    int64_t length = r->flexible ? get_count(r) : get(r, 2);
    if (length == -1)
        return 0;
    const uint8_t *id = get_bytes(r, length);
    for (int64_t i = 0; !r->is_bad && i < length; i++)
        if (id[i] >= 0x80)
            r->is_bad = 1;
    return 1;
}

int
parse_plain_produce(uint8_t *body, int64_t size, int version, plain_produce *p)
{
    reader r = {body, body + size, version >= FLEXIBLE_FROM, 0};
    p->version = version;
    p->topic_count = p->part_count = 0;
    if (version < FIRST_VERSION || version > LAST_VERSION)
        return 0;
    p->is_transactional = has_transactional_id(&r);
    p->acks = (int)get(&r, 2);
    get(&r, 4); /* the timeout: no replica is waited for */
    int64_t topics = get_count(&r);
    if (p->acks < -1 || p->acks > 1 || topics < 1 || topics > MAX_PRODUCE_PARTS)
        return 0;
    for (; !r.is_bad && topics > 0; topics--)
        parse_topic(&r, p);
    get_no_tags(&r);
    return !r.is_bad && r.at == r.end;
}

int64_t
produce_answer_bound(const plain_produce *p)
{
    int64_t bound = HEAD_ROOM + (int64_t)p->part_count * PARTITION_ROOM;
    for (int i = 0; i < p->topic_count; i++)
        bound += TOPIC_ROOM + p->topics[i].name_bytes;
    return bound;
}

static uint8_t *
write_partition(uint8_t *at, const produce_part *part, int version)
{
    const int flexible = version >= FLEXIBLE_FROM;
    at = write_big(at, part->partition, 4);
    at = write_big(at, 0, 2); /* no error */
    at = write_big(at, part->done.base_offset, 8);
    at = write_big(at, -1, 8); /* the topic keeps the producer's timestamps */
    if (version >= 5)
        at = write_big(at, part->done.log_start_offset, 8);
    if (version >= 8) {
        at = write_length(at, 0, flexible, 4);  /* no record errors */
        at = write_length(at, -1, flexible, 2); /* no message */
    }
    if (flexible)
        *at++ = 0; /* no tagged fields, here and below */
    return at;
}

uint8_t *
write_produce_answer(uint8_t *at, const plain_produce *p)
{
    const int flexible = p->version >= FLEXIBLE_FROM;
    at = write_length(at, p->topic_count, flexible, 4);
    for (int i = 0; i < p->topic_count; i++) {
        const request_topic *topic = &p->topics[i];
        if (p->version < TOPIC_IDS_FROM)
            at = write_length(at, topic->name_bytes, flexible, 2);
        memcpy(at, topic->name, topic->name_bytes);
        at = write_length(at + topic->name_bytes, topic->count, flexible, 4);
        for (int j = 0; j < topic->count; j++)
            at = write_partition(at, &p->parts[topic->first + j], p->version);
        if (flexible)
            *at++ = 0;
    }
    at = write_big(at, 0, 4); /* throttle time */
    if (flexible)
        *at++ = 0;
    return at;
}
