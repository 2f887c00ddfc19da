/* Connection rows: a row of words a client connection, in the control segment.
 *
 * A row is its owner's to write: the processor that has the socket (network/
 * processor_end.c). Handlers only read: who a request's sender is. By then the client
 * may have gone, and the row may be another connection's: a handler reads what it needs
 * first, and then whether the row still names the slot (is_row_of_slot). The processor
 * clears that word when a connection ends, before the row can be another's.
 */

#ifndef MPBROKER_CONNECTION_ROW_H
#define MPBROKER_CONNECTION_ROW_H

#include "ipc/request_slot.h"

/* Find the connection that a slot's request came by: its number and its row; 0 if what
 * the slot says cannot be. */
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
