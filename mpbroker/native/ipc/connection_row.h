/* Connection rows: in the control segment, a row of words for each client connection.
 *
 * Only its owner writes a row: the processor that has the socket
 * (network/processor_end.c). Handlers read there who sent a request. By then the client
 * may be gone, and another connection may have the row. So a handler reads the words
 * that it needs first, and then whether the row still names the slot (is_row_of_slot).
 * The processor clears that word when a connection ends, before another connection can
 * get the row.
 */

#ifndef MPBROKER_CONNECTION_ROW_H
#define MPBROKER_CONNECTION_ROW_H

#include "ipc/request_slot.h"

/* Find the number and the row of the connection by which a slot's request came; 0 if
 * the number in the slot is out of range. */
static inline int
find_connection(const memory *control, int64_t slot, int64_t *connection, int64_t *row)
{
    *connection = load(control, slot_row(slot) + L.SLOT_CONNECTION);
    if (*connection < 0 || *connection >= L.CONTROL_WORDS)
        return 0;
    *row = L.CONNECTION_ROWS + *connection * L.CONNECTION_WORDS;
    return has_words(control, *row, L.CONNECTION_WORDS);
}

static inline int
is_row_of_slot(const memory *control, int64_t row, int64_t slot)
{
    return load(control, row + L.CONNECTION_SLOT) == slot + 1;
}

#endif
