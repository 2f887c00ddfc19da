"""Every offset in the segment of clients' rates, in words. See quota_table.py.

The segment has a header, then rows: a row counts the rate of one client for one kind of
quota. A row and its mutex are made when they are first needed, so unused rows cost no
memory. Only the holder of a mutex writes the words that it guards.

    word    field             notes
    0-15    mutex             held while a row is given to a client
    16      refused           how often a client found no row

    word of a row
    0-15    mutex             robust, process-shared
    16      generation        0: never used; odd: free; even: in use by a client
    17-18   key               128 bits of a hash of kind, user and client id
    19      used              ns: last time anything was charged
    20      current           the sample that is being filled
    21      tokens            of a token bucket: the bits of a double
    22      tokens at         ns: when they were counted; 0: never
    23      throttles         how often a client was told to wait
    24      throttle ms       for how long in total
    25      charged           total ever
    26      kind              QuotaKind
    27      text length       bytes
    32-63   text              user, a zero byte and client id, cut off if too long
    64..    samples           start ns, value, last charged ns, unused; start 0: empty
"""

from typing import Final

QUOTA_TABLE_MUTEX: Final = 0
QUOTA_REFUSED: Final = 16
QUOTA_HEADER_WORDS: Final = 512

QUOTA_ROW_MUTEX: Final = 0
QUOTA_GENERATION: Final = 16
QUOTA_KEY: Final = 17
QUOTA_USED: Final = 19
QUOTA_CURRENT: Final = 20
QUOTA_TOKENS: Final = 21
QUOTA_TOKENS_AT: Final = 22
QUOTA_THROTTLES: Final = 23
QUOTA_THROTTLE_MS: Final = 24
QUOTA_CHARGED: Final = 25
QUOTA_KIND: Final = 26
QUOTA_TEXT_LENGTH: Final = 27
QUOTA_TEXT: Final = 32
QUOTA_SAMPLES: Final = 64
QUOTA_SAMPLE_WORDS: Final = 4
QUOTA_ROW_WORDS: Final = 256

# A row has room for one sample more than the number that is counted.
MAX_QUOTA_SAMPLES: Final = (QUOTA_ROW_WORDS - QUOTA_SAMPLES) // QUOTA_SAMPLE_WORDS - 1
MAX_QUOTA_ROWS: Final = 4096
QUOTA_SEGMENT_WORDS: Final = QUOTA_HEADER_WORDS + MAX_QUOTA_ROWS * QUOTA_ROW_WORDS


def quota_row(row: int) -> int:
    return QUOTA_HEADER_WORDS + row * QUOTA_ROW_WORDS
