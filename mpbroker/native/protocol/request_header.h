/* The header of a request, with which all requests begin, from the API key on.
 *
 *     bytes  field                      Source: Kafka protocol guide, "Request Header
 *     v1" 0-1    API key                    and "v2", which adds tagged fields 2-3
 *     API version 4-7    correlation id 8-9    client id's length; -1: null 10-
 *     client id
 */

#ifndef MPBROKER_REQUEST_HEADER_H
#define MPBROKER_REQUEST_HEADER_H

#include "base/big_endian.h"

enum api_key {
    PRODUCE = 0,
    FETCH = 1,
    API_VERSIONS = 18,
};

#define CORRELATION_ID 4
#define CORRELATION_ID_BYTES 4
#define CLIENT_ID_LENGTH 8
#define CLIENT_ID 10
#define MIN_REQUEST_HEADER 10
/* An answer's size field and correlation id. */
#define ANSWER_HEADER 8

static inline int64_t
request_api_key(const uint8_t *frame)
{
    return read_big(frame, 2);
}

static inline int64_t
request_api_version(const uint8_t *frame)
{
    return read_big(frame + 2, 2);
}

/* Return the size of a request's header; 0: Python has to read the header, because it
 * has tagged fields or a client id that is not ASCII, or is malformed. `size` is at
 * least MIN_REQUEST_HEADER; `is_flexible`: the header is of version 2. */
static inline int64_t
request_header_size(const uint8_t *frame, int64_t size, int is_flexible)
{
    int64_t at = CLIENT_ID, length = read_big(frame + CLIENT_ID_LENGTH, 2);
    if (length < -1 || length > size - at)
        return 0;
    for (; length > 0; length--)
        if (frame[at++] >= 0x80)
            return 0;
    if (is_flexible && (at >= size || frame[at++] != 0))
        return 0;
    return at;
}

#endif
