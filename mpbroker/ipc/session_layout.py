"""Every offset in the segment of fetch sessions, in words. See fetch_session.py.

word  field        notes; written under SESSION_CELL's mutex unless a writer is named 0
session id   0: free 1     epoch        the epoch that the next request must carry 2
used         ns 3     entries      how many; written by the handler whose request
claimed the epoch 4     created      ns 5     uses ids     1: its requests name topics
by id 8..   entries      SESSION_ENTRY_WORDS each; written by the same handler
"""

from typing import Final

SESSION_ID: Final = 0
SESSION_EPOCH: Final = 1
SESSION_USED: Final = 2
SESSION_ENTRY_COUNT: Final = 3
SESSION_CREATED: Final = 4
SESSION_USES_IDS: Final = 5
SESSION_HEADER_WORDS: Final = 8
SESSION_ENTRY_WORDS: Final = 8
SESSION_MAX_ENTRIES: Final = 16383  # with the header: 1 MiB of address space each
SESSION_WORDS: Final = 131072
MAX_SESSIONS: Final = 1000  # max.incremental.fetch.session.cache.slots

ENTRY_ROW: Final = (
    0  # partition row, and how often it was used before: TopicRegistry.row_id()
)
ENTRY_FETCH_OFFSET: Final = 1
ENTRY_MAX_BYTES: Final = 2
ENTRY_LEADER_EPOCH: Final = 3
ENTRY_SENT_HIGH_WATERMARK: Final = 4
ENTRY_SENT_LOG_START: Final = 5
ENTRY_SENT_ERROR: Final = 6
ENTRY_LAST_FETCHED_EPOCH: Final = 7
