/* Which topics a request's sender may write to and read, as far as Python was asked: the
 * tables that server/authorization/verdicts.py fills and empties. What they do not say is not denied
 * here but left to the usual way, which asks the authorizer; so nobody is refused here,
 * and nobody let in whom it has not let in before, under the same version of its rules.
 */

#include "server/handler_end.h"

#include <string.h>

#define ADDRESS_WORDS 2
#define KEY_WORDS (2 + ADDRESS_WORDS)

/* Who sent a slot's request, as request_context.py's senders are told apart. 0: its
 * connection has gone, and perhaps the row is another's.
 */
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

/* The topics of one sender; borrowed, NULL if there are none, perhaps an exception. */
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
may_read(const handler_end *self, int64_t slot, const plain_fetch *f, int uses_ids)
{
    const verdicts *v = &self->verdicts;
    PyObject *topics = NULL;
    int found = 1;
    if (!v->are_needed)
        return 1;
    for (int i = 0; found == 1 && i < f->topic_count; i++) {
        const char *text = (const char *)f->topics[i].name;
        int length = f->topics[i].name_bytes;
        PyObject *name = uses_ids ? PyBytes_FromStringAndSize(text, length)
                                  : PyUnicode_DecodeUTF8(text, length, NULL);
        if (name == NULL) {
            PyErr_Clear();
            return 0;
        }
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
