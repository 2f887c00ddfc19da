/* Request slots: in the control segment, a row of words for each request.
 *
 * Line 1 of a row (connection, where the request is) is written by the processor that
 * the slot belongs to. The state in line 1 is written by each owner of the request in
 * turn: ipc/layout.py lists the transitions. Line 2 (intent, progress, the answer, time
 * stamps) is cleared by the processor, and then written by the handler that has claimed
 * the request; after a death, by the process that repairs the slot.
 */

#ifndef MPBROKER_REQUEST_SLOT_H
#define MPBROKER_REQUEST_SLOT_H

#include "ipc/layout.h"
#include "ipc/shared_memory.h"

static inline int64_t
slot_row(int64_t slot)
{
    return L.SLOTS + slot * L.SLOT_WORDS;
}

static inline int
is_slot(int64_t slot)
{
    return slot >= 0 && slot < L.MAX_SLOTS;
}

/* Return the generation in a slot's state word: the word without state and handler. */
static inline int64_t
generation_of(int64_t state)
{
    return state & ~(((int64_t)1 << L.GENERATION_SHIFT) - 1);
}

/* Change a slot's state and the handler that the state names; keep the generation. */
static inline void
set_slot_state(const memory *control, int64_t slot, int64_t state)
{
    int64_t at = slot_row(slot) + L.SLOT_STATE;
    store(control, at, generation_of(load(control, at)) | state);
}

/* Return a state together with the handler that is responsible for the slot. */
static inline int64_t
state_of_handler(int64_t handler, int64_t state)
{
    return (handler + 1) << L.STATE_HANDLER_SHIFT | state;
}

#endif
