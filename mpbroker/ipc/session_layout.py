"""Every offset in the segment of fetch sessions, in words. See fetch_session.py.

Each session has a row of SESSION_WORDS words. What has no writer named here is written
under SESSION_CELL's mutex.

    word     field        notes
    0        session id   0: free
    1        epoch        the epoch that the next request must carry
    2        used         ns
    3        entries      how many; written by the handler whose request has claimed the
                          epoch
    4        created      ns
    5        uses ids     1: its requests name topics by id
    6        topics end   where the topics end, in words from SESSION_TOPICS on; written
                          as the entries are
    8..      entries      SESSION_ENTRY_WORDS each; written by the same handler
    131072.. topics       one after another, never moved while the session lives;
                          written by the same handler

The words of an entry are named ENTRY_... below. A topic has its id, 16 bytes; the
length of its name in bytes; and its name in UTF-8, filled up with zeros to whole words.
"""

from typing import Final

SESSION_ID: Final = 0
SESSION_EPOCH: Final = 1
SESSION_USED: Final = 2
SESSION_ENTRY_COUNT: Final = 3
SESSION_CREATED: Final = 4
SESSION_USES_IDS: Final = 5
SESSION_TOPICS_END: Final = 6
SESSION_HEADER_WORDS: Final = 8
SESSION_ENTRY_WORDS: Final = 8
SESSION_MAX_ENTRIES: Final = 16383  # as many as fit in front of the topics
SESSION_TOPICS: Final = 131072
SESSION_TOPICS_WORDS: Final = 131072
SESSION_WORDS: Final = SESSION_TOPICS + SESSION_TOPICS_WORDS  # 2 MiB of address space
MAX_SESSIONS: Final = 1000  # max.incremental.fetch.session.cache.slots

# Partition row, and how often it was used before: TopicRegistry.row_id(); NO_ROW: the
# partition did not exist when a request last looked.
ENTRY_ROW: Final = 0
ENTRY_FETCH_OFFSET: Final = 1
ENTRY_MAX_BYTES: Final = 2
ENTRY_LEADER_EPOCH: Final = 3
ENTRY_SENT_HIGH_WATERMARK: Final = 4
ENTRY_SENT_LOG_START: Final = 5
ENTRY_SENT_ERROR: Final = 6
# The partition's number << PLACE_BITS, and its topic's first word after SESSION_TOPICS.
ENTRY_PARTITION: Final = 7

NO_ROW: Final = -1
PLACE_BITS: Final = 32
