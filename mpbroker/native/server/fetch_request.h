/* A Fetch request without a session, and the answer to it.
 *
 * Left to Python: versions below 4, sessions, more than 8 topics or 24 partitions, a
 * topic that is named twice, tagged fields, racks beyond ASCII.
 */

#ifndef MPBROKER_FETCH_REQUEST_H
#define MPBROKER_FETCH_REQUEST_H

#include "protocol/request_fields.h"
#include "storage/log_reader.h"

#define MAX_FETCH_TOPICS 8
#define MAX_FETCH_PARTITIONS 24
#define FETCH_FLEXIBLE_FROM 12

typedef struct {
    int index;
    int64_t offset, max_bytes, leader_epoch;
    PyObject *plan; /* borrowed, while the request is executed */
    read_region found;
} fetch_partition;

typedef struct {
    int version, read_committed, topic_count, partition_count;
    int64_t max_wait_ms, min_bytes, max_bytes;
    request_topic topics[MAX_FETCH_TOPICS];
    fetch_partition partitions[MAX_FETCH_PARTITIONS];
} fetch_request;

/* Read the request behind its header; 0: left to Python. */
int parse_fetch_request(const uint8_t *body, int64_t size, int version,
                        fetch_request *f);

/* Return the largest number of bytes that the answer's body can have. */
int64_t fetch_answer_bound(const fetch_request *f);

/* Write the answer behind its header, with the records that were found; return its end.
 * NULL: a file does not have all of these records. */
uint8_t *write_fetch_answer(uint8_t *at, const fetch_request *f);

#endif
