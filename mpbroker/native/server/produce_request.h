/* A Produce request, and the answer to it if all of it has succeeded.
 *
 * Left to Python: versions below 3, more than 40 partitions, tagged fields, null
 * batches and names, transactional ids beyond ASCII.
 */

#ifndef MPBROKER_PRODUCE_REQUEST_H
#define MPBROKER_PRODUCE_REQUEST_H

#include "protocol/log_validator.h"
#include "protocol/request_fields.h"
#include "storage/producers.h"

/* A slot's block has room to answer this many; it has progress words for more. */
#define MAX_PRODUCE_PARTITIONS 40
#define PRODUCE_FLEXIBLE_FROM 9

typedef struct {
    int index;
    uint8_t *batch; /* in the arena, where the request was received */
    int64_t batch_bytes;
    /* Results of the checks before anything is appended. The objects are owned while
     * the request is executed. */
    validation_limits limits;
    batch_producer producer;
    PyObject *plan, *entry; /* entry NULL: the batch has no producer */
    /* Results of the append. */
    appended done;
    int64_t log_start_offset;
    int has_waiters;
} produce_partition;

typedef struct {
    int version, acks, topic_count, partition_count;
    int is_transactional; /* the request has a transactional id */
    int64_t progress;     /* the arena word of the first partition's progress */
    request_topic topics[MAX_PRODUCE_PARTITIONS];
    produce_partition partitions[MAX_PRODUCE_PARTITIONS];
} produce_request;

/* Read the request behind its header; 0: left to Python. */
int parse_produce_request(uint8_t *body, int64_t size, int version, produce_request *p);

/* Return the largest number of bytes that the answer can have, its header and size
 * field included. */
int64_t produce_answer_bound(const produce_request *p);

/* Write the answer behind its header; return its end. */
uint8_t *write_produce_answer(uint8_t *at, const produce_request *p);

#endif
