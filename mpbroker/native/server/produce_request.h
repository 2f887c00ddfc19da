/* A Produce request, and the answer to one that has succeeded whole.
 *
 * Left to Python: versions below 3, more than 40 partitions, tagged fields, null
 * batches and names, transactional ids beyond ASCII.
 */

#ifndef MPBROKER_PRODUCE_REQUEST_H
#define MPBROKER_PRODUCE_REQUEST_H

#include "protocol/log_validator.h"
#include "protocol/request_fields.h"
#include "storage/producers.h"

/* As many as a slot's block has room to answer; it has room to note more. */
#define MAX_PRODUCE_PARTITIONS 40
#define PRODUCE_FLEXIBLE_FROM 9

typedef struct {
    int index;
    uint8_t *batch; /* in the arena, where the request was received */
    int64_t batch_bytes;
    /* What is found of it before anything is appended. The objects are owned while the
     * request is executed. */
    validation_limits limits;
    batch_producer producer;
    PyObject *plan, *entry; /* no entry: the batch is of no producer */
    /* And what has become of it. */
    appended done;
    int64_t log_start_offset;
    int has_waiters;
} produce_partition;

typedef struct {
    int version, acks, topic_count, partition_count;
    int is_transactional; /* it names a transactional id */
    int64_t progress;     /* the arena's word for the first partition that is done */
    request_topic topics[MAX_PRODUCE_PARTITIONS];
    produce_partition partitions[MAX_PRODUCE_PARTITIONS];
} produce_request;

/* Read what follows the header; 0: left to Python. */
int parse_produce_request(uint8_t *body, int64_t size, int version, produce_request *p);

/* Return how many bytes the answer takes at most, its header and size included. */
int64_t produce_answer_bound(const produce_request *p);

/* Write what follows the answer's header; return where it ends. */
uint8_t *write_produce_answer(uint8_t *at, const produce_request *p);

#endif
