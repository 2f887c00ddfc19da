/* What a handler has to do after a request that the core has executed. */

#ifndef MPBROKER_RESULT_FLAGS_H
#define MPBROKER_RESULT_FLAGS_H

/* The results of execute(); the module has these flags as constants. None: left to
 * Python. An API's key: the request is answered or forwarded. These flags are added to
 * the key: */
enum result_flag {
    RESULT_API_KEY = 0xFFFF, /* the bits of the key */
    /* Handlers wait for a partition that was appended to: appended() returns them. */
    RESULT_NOTIFY = 0x10000,
    /* The answer to a Produce is written, and may be sent when the records are on disk:
     * see appended(). Or a Fetch has to wait for records: see fetch_waits(). */
    RESULT_WAITS = 0x20000,
    /* The Produce is part of a transaction, and its client sends nothing else before
     * the answer: sync at once. */
    RESULT_AT_ONCE = 0x40000,
    /* The coordinator has to get the request first, because its transaction is not open
     * in one of the partitions. */
    RESULT_BEGINS = 0x80000,
};
/* In place of a key the result may be ROW_IS_HELD: the request is left to Python, which
 * first settles that row. */

#endif
