/* Request metrics: histograms of times, bytes and the request log, in the control
 * segment.
 *
 * A processor writes its own, its successors go on with them, and the exporter reads at
 * any time. The exporter writes one word: from which total time on requests are logged.
 */

#ifndef MPBROKER_REQUEST_METRICS_H
#define MPBROKER_REQUEST_METRICS_H

#include "ipc/shared_memory.h"

/* Count a slot's request as one of a processor's, once its answer is out.
 *
 * Before its connection is read from again: the request's first bytes are looked at.
 * `taken_ns`: when the processor had the answer; `sent_ns`: when all of it was out.
 */
void record_request(const memory *control, const memory *arena, int64_t processor,
                    int64_t slot, int64_t taken_ns, int64_t sent_ns);

#endif
