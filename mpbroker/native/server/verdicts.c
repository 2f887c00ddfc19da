/* Python twin: server/authorization/verdicts.py. */

#include "server/verdicts.h"

#include "ipc/connection_row.h"
#include "server/handler_end.h"

#include <string.h>

#define ADDRESS_WORDS 2
#define KEY_WORDS (2 + ADDRESS_WORDS)

/* Read the key of the sender of a slot's request: principal, listener and address, as
 * in request_context.py. 0: the connection has ended, and another may have the row. */
static int
read_sender(const handler_end *self, int64_t slot, uint8_t *key)
{
    const memory *control = &self->control;
    int64_t connection, row;
    if (!find_connection(control, slot, &connection, &row))
        return 0;
    int64_t sender[KEY_WORDS] = {
        load(control, row + L.CONNECTION_PRINCIPAL),
        load(control, row + L.CONNECTION_LISTENER),
        load(control, row + L.CONNECTION_PEER_ADDRESS),
        load(control, row + L.CONNECTION_PEER_ADDRESS + 1),
    };
    memcpy(key, sender, sizeof sender);
    return is_row_of_slot(control, row, slot);
}

/* Return the topics of a slot's sender in a table, borrowed; NULL, perhaps with an
 * exception, if it has none. */
static PyObject *
topics_of(const handler_end *self, int64_t slot, PyObject *by_sender)
{
    uint8_t bytes[KEY_WORDS * 8];
    if (!read_sender(self, slot, bytes))
        return NULL;
    PyObject *key = PyBytes_FromStringAndSize((char *)bytes, sizeof bytes);
    PyObject *topics = key ? PyDict_GetItemWithError(by_sender, key) : NULL;
    Py_XDECREF(key);
    return topics != NULL && PySet_CheckExact(topics) ? topics : NULL;
}

int
may_write(const handler_end *self, int64_t slot, PyObject *topic)
{
    const verdicts *v = &self->verdicts;
    if (!v->are_needed)
        return 1;
    int found = PySet_Contains(v->anybody_writes, topic);
    if (found)
        return found;
    PyObject *topics = topics_of(self, slot, v->writers);
    if (topics == NULL)
        return PyErr_Occurred() ? -1 : 0;
    return PySet_Contains(topics, topic);
}

int
may_read(const handler_end *self, int64_t slot, const request_topic *wanted, int count,
         int version)
{
    const verdicts *v = &self->verdicts;
    PyObject *topics = NULL; /* the sender's topics, found when first needed */
    int found = 1;
    if (!v->are_needed)
        return 1;
    for (int i = 0; found == 1 && i < count; i++) {
        PyObject *name = topic_key(&wanted[i], version);
        if (name == NULL)
            return 0;
        found = PySet_Contains(v->anybody_reads, name);
        if (found == 0) {
            if (topics == NULL)
                topics = topics_of(self, slot, v->readers);
            if (topics != NULL)
                found = PySet_Contains(topics, name);
            else if (PyErr_Occurred())
                found = -1;
        }
        Py_DECREF(name);
    }
    return found;
}
