/* Request metrics: histograms of times, bytes and the request log, in the control
 * segment.
 *
 * Each processor writes its own metrics, and its successors continue with them. The
 * exporter reads all metrics at any time, and writes one word: the total time from
 * which requests are logged.
 */

#ifndef MPBROKER_REQUEST_METRICS_H
#define MPBROKER_REQUEST_METRICS_H

#include "ipc/shared_memory.h"

/* Count a slot's request for a processor, after all of its answer was sent.
 *
 * To be called before the connection is read again, because this reads the first bytes
 * of the request. `taken_ns`: when the processor took the answer from its ring;
 * `sent_ns`: when all of the answer was sent.
 */
void record_request(const memory *control, const memory *arena, int64_t processor,
                    int64_t slot, int64_t taken_ns, int64_t sent_ns);

#endif
