"""Every offset in shared memory, layout version 10.

Segments with a file of their own (session_layout, quota_layout, limits_page...) are the
exception; no other file holds offsets.

Unless said otherwise an offset counts 8-byte native-endian signed words. Words are
stored one at a time through a memoryview cast to "q". That is one aligned 8-byte store,
so a single word can commit an operation. A word that is written often has a 128-byte
line (16 words) of its own, so that two writers do not share a cache line.

    control segment (memfd, sparse)
    +--------------------------+  0
    | header                   |  identity, phase, acceptors that shall retire
    +--------------------------+  LANES
    | request ring             |  many processors to many handlers
    +--------------------------+  RESPONSE_RINGS
    | response ring [0..P)     |  many handlers to one processor
    +--------------------------+  NOTIFICATION_RINGS
    | notification ring [0..H) |  "that partition changed", "that request must end":
    |                          |  any to one handler
    +--------------------------+  CELLS
    | shared log cells         |  mutex and committed end of the metadata log
    +--------------------------+  PROCESSORS, HANDLERS
    | a row per process        |
    +--------------------------+  SLOTS
    | slot table               |  P x SLOTS_PER_PROCESSOR, one request each
    +--------------------------+  CONNECTIONS
    | connection rows          |  one client connection each
    +--------------------------+  COORDINATOR_RING
    | the coordinator's lane   |  many handlers to the coordinator
    +--------------------------+  CONTROL_RING
    | the control plane's ring |  its processor to its handler
    +--------------------------+  METRICS
    | request metrics          |  see request_metrics.py
    +--------------------------+

    partition segment (memfd, sparse): one row per partition; then fetched_bytes.py
    session segment (memfd, sparse): see session_layout.py
    arena (memfd, sparse): see arena.py
"""

from enum import IntEnum
from typing import Final

MAGIC: Final = 0x6D70_6272_6F6B_6572  # "mpbroker"
LAYOUT_VERSION: Final = 11

FENCE: Final = 0x6D70_2066_656E_6365  # "mp fence"

LINE: Final = 16  # words
PAGE: Final = 512  # words

# A set of ids is a mask: a bit for each id, MASK_BITS of them in each of MASK_WORDS
# words, which stay positive (masks.py).
MASK_BITS: Final = 60
MASK_WORDS: Final = 2

# A machine with 64 cores has room for a handler on each of them, and four listeners for
# 16 processors each. All is sparse: an id that is not used costs a few pages. The
# number of processors is a power of two, as the capacity of a ring must be.
MAX_PROCESSORS: Final = 64
MAX_HANDLERS: Final = MASK_BITS * MASK_WORDS - 1
# The coordinator is a handler with a ring of its own: it parks, syncs and answers as
# handlers do, under the id after theirs.
COORDINATOR: Final = MAX_HANDLERS
# Each id has a bit in a mask.
HANDLER_IDS: Final = MAX_HANDLERS + 1
# The housekeeper is none of them: it has this id only as the owner of syncs.
HOUSEKEEPER: Final = HANDLER_IDS
# A parked fetch holds a slot: two processors have room for more than 10,000 of them.
SLOTS_PER_PROCESSOR: Final = 8192
CONNECTIONS_PER_PROCESSOR: Final = 16384
MAX_SLOTS: Final = MAX_PROCESSORS * SLOTS_PER_PROCESSOR

# --- header -----------------------------------------------------------------
#   word  field            written by
#   0     magic            supervisor, last of all at start
#   1     layout version   supervisor, at start
#   2     boot id          supervisor, at start (wall clock, ns)
#   3     supervisor pid   supervisor, at start
#   4     phase            supervisor
#   5     clean start      supervisor, at start: 1 if the last stop was clean
#   6     death epoch      supervisor: bumped after every repair
#   7     active handlers  supervisor: how many handlers share the ring
#   8     keeper           the keeper, at its start: +1 asks for all sockets again
#   9     TCP counters     the keeper, at its start: 1 exact, -1 not exact
#   10    control plane    supervisor, at start: its listener + 1; 0: there is none
#   11    housekeeper      the housekeeper: deletions that it has passed (row_users.py)
#   12    exporter         the exporter: likewise
#   13    keeper guard     the keeper: its guard's process id; the guard, and the
#                          supervisor before it ends the keeper: 0, nothing to wait for
#   14    refused          any: a bit for each log directory that had no room for an
#                          append; the housekeeper takes the notes (full_directories.py)
#   15    full             the housekeeper: a bit for each log directory that is full
#   16    offline          the housekeeper: a bit for each log directory that it cannot
#                          read any more (offline_directories.py)
#   17    offline changes  any: a time (CLOCK_MONOTONIC, ns), stored after a partition
#                          or a log directory went offline, or a directory came back;
#                          the supervisor, after it has repaired for a dead process
HEADER_MAGIC: Final = 0
HEADER_VERSION: Final = 1
HEADER_BOOT_ID: Final = 2
HEADER_SUPERVISOR_PID: Final = 3
HEADER_PHASE: Final = 4
HEADER_CLEAN_START: Final = 5
HEADER_DEATH_EPOCH: Final = 6
HEADER_ACTIVE_HANDLERS: Final = 7
HEADER_KEEPER: Final = 8
HEADER_COUNTERS: Final = 9
HEADER_CONTROL_PLANE: Final = 10
HEADER_HOUSEKEEPER_PASSED: Final = 11
HEADER_EXPORTER_PASSED: Final = 12
HEADER_KEEPER_GUARD: Final = 13
HEADER_DIRECTORIES_REFUSED: Final = 14
HEADER_DIRECTORIES_FULL: Final = 15
HEADER_DIRECTORIES_OFFLINE: Final = 16
HEADER_OFFLINE_CHANGES: Final = 17


class Phase(IntEnum):
    """The phase of the whole broker, from its start to its stop."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2  # accepts nothing new; answers the requests it has
    STOPPED = 3


# The header also has one word for each listener, written by the supervisor: the process
# id of an acceptor that shall retire, because another acceptor has taken its place.
# MAX_PROCESSORS words, since each listener has a processor.
HEADER_RETIRING: Final = 64

# And it has a pulse (see pulse.py) for each process that has no row of its own:
# the housekeeper, the keeper, the exporter, and from ACCEPTOR_PULSES on the acceptor of
# each listener. Handlers and the coordinator have theirs in their rows, and a processor
# shows its progress by other words.
#   0     pid            the process, when its pulse begins
#   1     steps          the process: +1 with each part of its work
#   2     awaits         the process: the thread id of the owner of a lock that it
#                        sleeps for; 0: none
HEADER_PULSES: Final = 128
PULSE_WORDS: Final = 4
PULSE_PID: Final = 0
PULSE_STEPS: Final = 1
PULSE_AWAITS: Final = 2
HOUSEKEEPER_PULSE: Final = 0
KEEPER_PULSE: Final = 1
EXPORTER_PULSE: Final = 2
ACCEPTOR_PULSES: Final = 4
assert HEADER_PULSES + (ACCEPTOR_PULSES + MAX_PROCESSORS) * PULSE_WORDS < PAGE


# --- rings ------------------------------------------------------------------
#   word    field     written by                       notes
#   0-15    mutex     its holder                       robust, process-shared
#   16      head      the consumer, under mutex (*)    total ever taken; never wraps
#   32      tail      a producer, under mutex          total ever put; never wraps
#   48-49   sleepers  both, under mutex                mask of the sleeping consumers
#   50      overflow  any, under mutex                 notification rings only
#   63      fence     supervisor, at start             see canaries.py
#   64..    entries   a producer, under mutex          slot index
# (*) a response ring has one consumer, which moves head without the mutex.
RING_MUTEX: Final = 0
RING_HEAD: Final = 16
RING_TAIL: Final = 32
RING_SLEEPERS: Final = 48
# Notification rings only: entries were dropped, so the handler checks all partitions.
RING_OVERFLOW: Final = 50
RING_FENCE: Final = 63
RING_ENTRIES: Final = 64

REQUEST_RING_CAPACITY: Final = MAX_SLOTS  # so that it can never overflow
RESPONSE_RING_CAPACITY: Final = SLOTS_PER_PROCESSOR  # likewise
NOTIFICATION_RING_CAPACITY: Final = 448  # the whole ring fills one page

REQUEST_RING_WORDS: Final = RING_ENTRIES + REQUEST_RING_CAPACITY
RESPONSE_RING_WORDS: Final = RING_ENTRIES + RESPONSE_RING_CAPACITY
NOTIFICATION_RING_WORDS: Final = RING_ENTRIES + NOTIFICATION_RING_CAPACITY

# --- shared log cells ---------------------------------------------------------
#   0-15    mutex     its holder
#   16      end       a writer, under mutex            committed length in bytes
CELL_MUTEX: Final = 0
CELL_END: Final = 16
CELL_WORDS: Final = 32
METADATA_CELL: Final = 0
SESSION_CELL: Final = 1  # guards the fetch session table; end: rows ever used
CELL_COUNT: Final = 8

# --- processor rows -----------------------------------------------------------
#   word  field          written by
#   0     listener + 1   supervisor: the listener it serves; 0: no such processor
#   1     pid            supervisor
#   2     incarnation    supervisor: +1 at every respawn
#   3     ready          the processor: its incarnation, once it serves
#   4     move order     supervisor: +1 says that 6, 8 and 9 hold a new order
#   5     (not used)
#   6     move count     supervisor: connections to give away; -1: all, also new ones
#   7     serves         supervisor: listener + 1, until another child has the id
#   8-9   move targets   supervisor: mask of the processors that may get connections
#   16    handed         the listener's acceptor: connections ever passed to it
#   24    read on        handlers: changes when they have stored a slot's "read on"
#   32    registered     the processor: connections ever registered
#   33    slots used     the processor: its slots from this number on were never used
#   34    rows used      the processor: the same of its connection rows
#   35-59 counters       the processor (ProcessorCounter)
#   60    move done      the processor: the last move order it has carried out
#   61    unit cost      the processor, once a second: ns, see network_costs.py
#   62    beat           the processor, once a second in any case: ns
#   63    delivered      the keeper: the last incarnation that it sent all sockets
PROCESSOR_LISTENER: Final = 0
PROCESSOR_PID: Final = 1
PROCESSOR_INCARNATION: Final = 2
PROCESSOR_READY: Final = 3
PROCESSOR_MOVE_ORDER: Final = 4
PROCESSOR_MOVE_COUNT: Final = 6
PROCESSOR_SERVES: Final = 7
PROCESSOR_MOVE_TARGETS: Final = 8
PROCESSOR_HANDED: Final = 16
PROCESSOR_READ_ON: Final = 24
PROCESSOR_REGISTERED: Final = 32
PROCESSOR_SLOTS_USED: Final = 33
PROCESSOR_ROWS_USED: Final = 34
PROCESSOR_COUNTERS: Final = 35
PROCESSOR_MOVE_DONE: Final = 60
PROCESSOR_UNIT_COST: Final = 61
UNIT_SHIFT: Final = 16  # bytes that cost a processor as much as a request does
PROCESSOR_BEAT: Final = 62
PROCESSOR_DELIVERED: Final = 63
PROCESSOR_WORDS: Final = 64


class ProcessorCounter(IntEnum):
    """The counters of a processor, in its record: words from PROCESSOR_COUNTERS on.

    CONNECTIONS is the number of open connections; all other counters only grow.
    """

    CONNECTIONS = 0
    REQUESTS = 1
    BYTES_IN = 2
    BYTES_OUT = 3
    CLOSED_BY_PEER = 4
    CLOSED_BAD_FRAME = 5
    CLOSED_IDLE = 6
    CLOSED_ERROR = 7
    WAITS_FOR_SLOT = 8
    WAITS_FOR_EXTENT = 9
    WAITS_FOR_RING = 10
    IDLE_NS = 11
    CLOSED_BY_HANDLER = 12
    RESUMED = 13  # connections taken over from dead processors
    MOVED_IN = 14
    MOVED_OUT = 15
    LOST = 16  # connections of dead processors that could not be resumed
    CLOSED_EXCESS = 17  # above max.connections
    POLLS = 18
    EMPTY_POLLS = 19  # polls that returned early and without events: network/polls.py


# --- handler rows ---------------------------------------------------------------
#   word  field          written by
#   0     active         supervisor: 1 while this handler id exists, 2 if it is the
#                        control plane's handler (*)
#   1     pid            supervisor (*)
#   2     incarnation    supervisor
#   3     ready          the handler: its incarnation, once it serves
#   16    busy slot      the handler: slot + 1 it works on, for the post-mortem
#   17    busy since     the handler, ns
#   18-31 counters       the handler (HandlerCounter)
#   32    steps          the handler: +1 at each partition that a request makes, opens
#                        or deletes, so that a request for 100,000 partitions is not
#                        taken for an endless one, and at each part of a log that it
#                        recovers; the coordinator: also +1 in each turn
#   33    starved        the handler, and the supervisor when the handler has retired:
#                        ns since when no answer has got room in the handler's
#                        region though some wait for it; 0: none waits
#   34    starved bytes  the handler: bytes for which answers wait
#   35    awaits         the handler: the thread id of the owner of a lock that it
#                        sleeps for; 0: none
#   36    passed         the handler, and the supervisor before it is forked and when it
#                        has retired: see row_users.py
#   40-62 groups         the coordinator, in its own row alone (GroupFigure)
# (*) in its own row, the coordinator writes these two itself.
HANDLER_ACTIVE: Final = 0
HANDLER_ACTIVE_DATA: Final = 1
HANDLER_ACTIVE_CONTROL: Final = 2
HANDLER_PID: Final = 1
HANDLER_INCARNATION: Final = 2
HANDLER_READY: Final = 3
HANDLER_BUSY_SLOT: Final = 16
HANDLER_BUSY_SINCE: Final = 17
HANDLER_COUNTERS: Final = 18
HANDLER_STEPS: Final = 32
HANDLER_STARVED: Final = 33
HANDLER_STARVED_BYTES: Final = 34
HANDLER_AWAITS: Final = 35
HANDLER_PASSED: Final = 36
HANDLER_GROUPS: Final = 40
HANDLER_WORDS: Final = 64


class HandlerCounter(IntEnum):
    """The counters of a handler, in its record: words from HANDLER_COUNTERS on.

    PARKED and PARKED_FETCHES are numbers of requests that wait now; all other counters
    only grow. The number 4 is free.
    """

    REQUESTS = 0
    SESSIONS_REFUSED = 1  # fetches that got no session
    PARKED = 2
    SYNCS = 3
    IDLE_NS = 5
    PARKED_FETCHES = 6  # of PARKED


class GroupFigure(IntEnum):
    """Numbers about groups, in the coordinator's record: words from HANDLER_GROUPS on.

    Figures that count records of share groups only grow. The others are numbers of
    groups or share sessions that exist now.
    """

    CLASSIC = 0  # groups
    CONSUMER = 1
    SHARE_EMPTY = 2
    SHARE_STABLE = 3
    SHARE_SESSIONS = 4
    ACCEPTED = 5  # records of share groups
    RELEASED = 6
    REJECTED = 7
    RENEWED = 8
    LOCKS_ENDED = 9  # records that were not acknowledged in time
    CLASSIC_EMPTY = 10  # groups by state
    CLASSIC_PREPARING_REBALANCE = 11
    CLASSIC_COMPLETING_REBALANCE = 12
    CLASSIC_STABLE = 13
    CONSUMER_EMPTY = 14
    CONSUMER_ASSIGNING = 15
    CONSUMER_RECONCILING = 16
    CONSUMER_STABLE = 17
    STREAMS_EMPTY = 18
    STREAMS_NOT_READY = 19
    STREAMS_ASSIGNING = 20
    STREAMS_RECONCILING = 21
    STREAMS_STABLE = 22


# The figures that are numbers of groups by type and state, in Kafka's words. Dead
# groups are not kept, so they have no figure.
GROUP_STATES: Final = {
    ("classic", "Empty"): GroupFigure.CLASSIC_EMPTY,
    ("classic", "PreparingRebalance"): GroupFigure.CLASSIC_PREPARING_REBALANCE,
    ("classic", "CompletingRebalance"): GroupFigure.CLASSIC_COMPLETING_REBALANCE,
    ("classic", "Stable"): GroupFigure.CLASSIC_STABLE,
    ("consumer", "Empty"): GroupFigure.CONSUMER_EMPTY,
    ("consumer", "Assigning"): GroupFigure.CONSUMER_ASSIGNING,
    ("consumer", "Reconciling"): GroupFigure.CONSUMER_RECONCILING,
    ("consumer", "Stable"): GroupFigure.CONSUMER_STABLE,
    ("share", "Empty"): GroupFigure.SHARE_EMPTY,
    ("share", "Stable"): GroupFigure.SHARE_STABLE,
    ("streams", "Empty"): GroupFigure.STREAMS_EMPTY,
    ("streams", "NotReady"): GroupFigure.STREAMS_NOT_READY,
    ("streams", "Assigning"): GroupFigure.STREAMS_ASSIGNING,
    ("streams", "Reconciling"): GroupFigure.STREAMS_RECONCILING,
    ("streams", "Stable"): GroupFigure.STREAMS_STABLE,
}


# --- slots ------------------------------------------------------------------------
# A slot holds one request, from its first byte to the last byte of its answer.
#
#   word  field             notes
#   -- line 1: the processor --
#   0     state             bits 0-7 SlotState, 8-23 handler id + 1, 24.. generation
#   1     connection        connection row index
#   2     request offset    bytes, in the arena
#   3     request length    bytes, without the size field
#   4     received          ns, monotonic
#   5     block             bytes, in the arena: the slot's own 16 KiB
#   6     must end          the request of this generation must not wait
#                           (network/waits.py)
#   7     error             the handler: the code + 2 of an error in the answer
#   8     error of          the handler: ``received`` of the request that has it
#   9     aside of          the request of this generation was set aside, or comes
#                           behind one (network/pipelining); 10-12 are about it
#   10    aside row         generation of its connection's row
#   11    before            slot + 1 of the connection's request before it; 0: none
#   12    before of         generation of that request
#   13    read on           the handler: the connection may send its next request behind
#                           the request of this generation
#   -- line 2: the handler that has claimed it --
#   16    intent            (ordinal + 1) << 32 | (partition row + 1); 0: none
#   17    intent base       base offset of the append under way
#   18    progress          how many of the request's partitions are done
#   19    progress offset   bytes, in the arena: one word for each partition done, with
#                           its base offset, or -1 - error code
#   20    response kind     ResponseKind
#   21    response offset   bytes, in the arena
#   22    response length   bytes
#   23    extent            bytes, in the arena: the handler's extent; 0: none
#   24    extent length     bytes
#   25    session claim     fetch session epoch this request has claimed, + 1
#   26    deadline          ns, monotonic: when a parked request must be answered
#   27    dequeued          ns: execution began
#   28    completed         ns: answered
#   29    retries           supervisor: how often it was put back after a death
#   30    parked            ns: execution ended and the wait began; 0: no wait
#   31    taken             ns; the processor, once it has the answer
SLOT_STATE: Final = 0
SLOT_CONNECTION: Final = 1
SLOT_REQUEST_OFFSET: Final = 2
SLOT_REQUEST_LENGTH: Final = 3
SLOT_RECEIVED: Final = 4
SLOT_BLOCK: Final = 5
SLOT_MUST_END: Final = 6
SLOT_ERROR: Final = 7
SLOT_ERROR_OF: Final = 8
SLOT_ASIDE_OF: Final = 9
SLOT_ASIDE_ROW: Final = 10
SLOT_BEFORE: Final = 11
SLOT_BEFORE_OF: Final = 12
SLOT_READ_ON: Final = 13
SLOT_INTENT: Final = 16
SLOT_INTENT_BASE: Final = 17
SLOT_PROGRESS: Final = 18
SLOT_PROGRESS_OFFSET: Final = 19
SLOT_RESPONSE_KIND: Final = 20
SLOT_RESPONSE_OFFSET: Final = 21
SLOT_RESPONSE_LENGTH: Final = 22
SLOT_EXTENT: Final = 23
SLOT_EXTENT_LENGTH: Final = 24
SLOT_SESSION_CLAIM: Final = 25
SLOT_DEADLINE: Final = 26
SLOT_DEQUEUED: Final = 27
SLOT_COMPLETED: Final = 28
SLOT_RETRIES: Final = 29
SLOT_PARKED: Final = 30
SLOT_TAKEN: Final = 31
SLOT_WORDS: Final = 32

STATE_MASK: Final = 0xFF
STATE_HANDLER_SHIFT: Final = 8
STATE_HANDLER_MASK: Final = 0xFFFF << STATE_HANDLER_SHIFT
GENERATION_SHIFT: Final = 24


class SlotState(IntEnum):
    """The state of a slot, which holds one request and then its answer.

    The only transitions, and the process that may make each (``put`` and ``take`` are
    methods of the request ring, and the mutex is the ring's):

        FREE -> HELD -> READY          its processor; READY in ``put``, under the mutex
        READY -> CLAIMED               a handler, in ``take``, under the mutex
        CLAIMED <-> PARKED             the handler that has claimed it
        CLAIMED -> RESPONDING          its processor, before the response ring's head
        RESPONDING -> HELD or FREE     its processor
        CLAIMED, PARKED -> READY       the supervisor, after the handler was reaped;
                                       or the handler itself, when it retires
        any -> FREE, or left alone     the supervisor, after the processor was reaped
    """

    FREE = 0
    HELD = 1  # a connection reads into its block
    READY = 2  # on the request ring
    CLAIMED = 3  # a handler works on it, or its answer is on the response ring
    PARKED = 4  # its handler keeps it until there is data, a sync, or its deadline
    RESPONDING = 5  # the processor sends the answer


class ResponseKind(IntEnum):
    """What the processor is to do when a handler has answered a request."""

    NONE = 0  # nothing to send (acks=0): unmute
    BYTES = 1  # send the response extent
    PARTS = 2  # send a list of parts: see response_parts.py
    CLOSE = 3  # close the connection


# --- connection rows ------------------------------------------------------------
# A row has everything that a successor needs to continue a connection. Only the
# processor that owns a row (word 22) writes it, wherever in the table it lies. One
# store to the owner word gives the row to another processor.
#
#   word  field            notes
#   0     state            bits 0-7 ConnectionState, bit 8 which copy is valid,
#                          generation above
#   1     listener         listener index
#   2     fd               in the processor, for logs
#   3     slot + 1         the slot whose block it reads into; 0: none; negative: the
#                          connection ended with a request in this slot
#   4-5   position         two copies: (bytes of the client's stream before the block)
#                          << POSITION_SHIFT | start, the first byte in the block that
#                          is not yet consumed
#   6     extent           bytes, in the arena: a frame that outgrew the block; 0: none
#   7     extent length    bytes: that whole frame, with its size field
#   8-9   sent             two copies: bytes of the answers before this one
#   10    encryption       TLS version and cipher suite, or 0: see encryption.py
#   12    opened           ns
#   13    active           ns: last time that bytes were received or sent
#   14    accept sequence  the acceptor's running number
#   16-17 local address    IPv6 form, 16 bytes
#   18    local port
#   19-20 peer address     IPv6 form, 16 bytes
#   21    peer port
#   22    owner + 1        the processor that has, or is to have, the socket
#   23    holder           owner's incarnation << 8 | owner, once it has the socket
#   24    cookie           SO_COOKIE, the kernel's unique number of the socket
#   25    principal        the client's number in the principals table; 0: anonymous
#   26    muted until      monotonic ns: nothing more is read before then (KIP-219)
#   27    security         bits 0-7 ConnectionSecurity; above them the end of the
#                          session, monotonic ms; 0: it has no end (KIP-368)
#   28    by token         1: the client has authenticated by a delegation token
#
# The row does not say how much of the stream has been received, nor how much of an
# answer has been sent. The kernel counts both (network/moves/tcp_counters.py), and its
# counts are right at whatever moment we die. A finished answer changes position and
# sent together: their other copies are written first, then one store to the state makes
# these copies valid.
CONNECTION_STATE: Final = 0
CONNECTION_LISTENER: Final = 1
CONNECTION_FD: Final = 2
CONNECTION_SLOT: Final = 3
CONNECTION_POSITION: Final = 4
CONNECTION_EXTENT: Final = 6
CONNECTION_EXTENT_LENGTH: Final = 7
CONNECTION_SENT: Final = 8
CONNECTION_ENCRYPTION: Final = 10
CONNECTION_OPENED: Final = 12
CONNECTION_ACTIVE: Final = 13
CONNECTION_ACCEPT_SEQUENCE: Final = 14
CONNECTION_LOCAL_ADDRESS: Final = 16
CONNECTION_LOCAL_PORT: Final = 18
CONNECTION_PEER_ADDRESS: Final = 19
CONNECTION_PEER_PORT: Final = 21
CONNECTION_OWNER: Final = 22
CONNECTION_HOLDER: Final = 23
CONNECTION_COOKIE: Final = 24
CONNECTION_PRINCIPAL: Final = 25
CONNECTION_MUTED_UNTIL: Final = 26
CONNECTION_SECURITY: Final = 27
CONNECTION_BY_TOKEN: Final = 28
CONNECTION_WORDS: Final = 32

CONNECTION_COPY_SHIFT: Final = 8
POSITION_SHIFT: Final = 14  # a block's request part is shorter than 16 KiB
POSITION_MASK: Final = (1 << POSITION_SHIFT) - 1
SECURITY_MASK: Final = 0xFF
SESSION_SHIFT: Final = 8


class ConnectionState(IntEnum):
    """The state of a client's connection."""

    FREE = 0
    READING = 1  # not muted: bytes are read and framed
    IN_FLIGHT = 2  # muted: the handlers have its request
    SENDING = 3  # muted: its answer is being written
    PIPELINED = 4  # several requests are in flight: it ends with its processor


def is_with_handlers(words: memoryview, slot: int, generation: int) -> bool:
    """Return whether a slot has the request of a generation, without an answer yet."""
    state = words[slot_row(slot) + SLOT_STATE]
    return bool(
        state >> GENERATION_SHIFT == generation
        and state & STATE_MASK in (SlotState.READY, SlotState.CLAIMED, SlotState.PARKED)
    )


def is_request_of(words: memoryview, row: int, slot: int) -> bool:
    """Return whether a slot's request is one of a connection that is still open.

    To be called after its row was read: a row may become another connection's only when
    this is no longer true.

    Args:
        words: the words of the control segment.
        row: the first word of the connection's row.
        slot: the slot, whose request is with the handlers.
    """
    if words[row + CONNECTION_SLOT] == slot + 1:
        return True
    # A row has room for one slot. An older request in flight names its row itself.
    at, state = slot_row(slot), words[row + CONNECTION_STATE]
    return bool(
        words[at + SLOT_ASIDE_OF] == words[at + SLOT_STATE] >> GENERATION_SHIFT
        and words[at + SLOT_ASIDE_ROW] == state >> GENERATION_SHIFT
        and state & STATE_MASK == ConnectionState.PIPELINED
    )


class ConnectionSecurity(IntEnum):
    """A connection's authentication, which decides if it can outlive its processor."""

    NONE = 0  # its row and the kernel have everything that a successor needs
    # TLS keys, or half an authentication, are in its processor's private memory: the
    # connection ends with this process.
    PRIVATE = 1
    # Authenticated by this SASL mechanism; otherwise as NONE.
    PLAIN = 2
    SCRAM_SHA_256 = 3
    SCRAM_SHA_512 = 4
    OAUTHBEARER = 5


# --- request metrics ----------------------------------------------------------------
# Their meaning is in request_metrics.py.
#
#   word  field           written by and notes
#   0     log above       the exporter: 1 + ns from which a request is logged; 0: none
#   16-31 starts          the supervisor, one word per role: processes ever started
#   32-47 deaths          the supervisor, one word per role: unexpected deaths
#   64-   blocked         an acceptor, one word per listener: ns without a processor
#   128-  connections     an acceptor, the words of AcceptorCounter per listener
#   512.. API rows        a processor: API_ROWS of API_ROW_WORDS each
#   then  request logs    a processor: LOG_ENTRIES of LOG_ENTRY_WORDS, and their number
#   then  errors          a handler: one word per API key and error code
#   then  software        a handler: SOFTWARE_ENTRIES texts
#   then  connections     a handler with a request of the connection: its software
#   then  authentication  a processor: see authentication_counts.py
METRICS_LOG_ABOVE: Final = 0
METRICS_STARTS: Final = 16
METRICS_DEATHS: Final = 32
METRICS_BLOCKED: Final = 64
METRICS_CONNECTIONS: Final = METRICS_BLOCKED + MAX_PROCESSORS
ACCEPTOR_COUNTERS: Final = 4
METRICS_HEADER_WORDS: Final = PAGE
API_ROWS: Final = 128
HISTOGRAM_WORDS: Final = 24
HISTOGRAM_BUCKETS: Final = 23
HISTOGRAM_SHIFT: Final = 13  # the first bucket ends at 8.192 us
API_REQUEST_BYTES: Final = 0
API_RESPONSE_BYTES: Final = 1
API_HISTOGRAMS: Final = 8
API_STAGES: Final = 6
API_VERSIONS: Final = (
    32  # counters behind the histograms; the last: higher versions too
)
API_ROW_WORDS: Final = API_HISTOGRAMS + API_STAGES * HISTOGRAM_WORDS + API_VERSIONS
LOG_NOTED: Final = 0
LOG_FIRST: Final = LINE
LOG_ENTRIES: Final = 1024
LOG_ENTRY_WORDS: Final = 16
LOG_WORDS: Final = LOG_FIRST + LOG_ENTRIES * LOG_ENTRY_WORDS
ERROR_CODES: Final = 160  # from -1 on
SOFTWARE_ENTRIES: Final = 64
SOFTWARE_ENTRY_WORDS: Final = 16
AUTHENTICATION_WORDS: Final = 32
SOFTWARE_SHIFT: Final = 13  # handler and entry in the bits below it, cookie above
assert HANDLER_IDS * SOFTWARE_ENTRIES < 1 << SOFTWARE_SHIFT
assert METRICS_CONNECTIONS + MAX_PROCESSORS * ACCEPTOR_COUNTERS <= METRICS_HEADER_WORDS

# --- the control segment's blocks --------------------------------------------------


def _pages(words: int) -> int:
    """Return the length of a block of shared memory, rounded up to whole pages.

    The last word of each block is a fence, which no process writes (see `fences`).

    Args:
        words: the length of the block in words, without the fence.
    """
    return -(-(words + 1) // PAGE) * PAGE


HEADER: Final = 0
REQUEST_RING: Final = PAGE
RESPONSE_RINGS: Final = REQUEST_RING + _pages(REQUEST_RING_WORDS)
NOTIFICATION_RINGS: Final = RESPONSE_RINGS + _pages(
    MAX_PROCESSORS * RESPONSE_RING_WORDS
)
CELLS: Final = NOTIFICATION_RINGS + _pages(HANDLER_IDS * NOTIFICATION_RING_WORDS)
PROCESSORS: Final = CELLS + _pages(CELL_COUNT * CELL_WORDS)
HANDLERS: Final = PROCESSORS + _pages(MAX_PROCESSORS * PROCESSOR_WORDS)
SLOTS: Final = HANDLERS + _pages(HANDLER_IDS * HANDLER_WORDS)
CONNECTIONS: Final = SLOTS + _pages(MAX_SLOTS * SLOT_WORDS)
COORDINATOR_RING: Final = CONNECTIONS + _pages(
    MAX_PROCESSORS * CONNECTIONS_PER_PROCESSOR * CONNECTION_WORDS
)
CONTROL_RING: Final = COORDINATOR_RING + _pages(REQUEST_RING_WORDS)
METRICS: Final = CONTROL_RING + _pages(REQUEST_RING_WORDS)
API_TABLES: Final = METRICS + METRICS_HEADER_WORDS
REQUEST_LOGS: Final = API_TABLES + MAX_PROCESSORS * API_ROWS * API_ROW_WORDS
ERROR_TABLES: Final = REQUEST_LOGS + MAX_PROCESSORS * LOG_WORDS
SOFTWARE_TABLES: Final = ERROR_TABLES + HANDLER_IDS * API_ROWS * ERROR_CODES
CONNECTION_SOFTWARE: Final = (
    SOFTWARE_TABLES + HANDLER_IDS * SOFTWARE_ENTRIES * SOFTWARE_ENTRY_WORDS
)
AUTHENTICATION_TABLES: Final = (
    CONNECTION_SOFTWARE + MAX_PROCESSORS * CONNECTIONS_PER_PROCESSOR
)
CONTROL_WORDS: Final = METRICS + _pages(
    AUTHENTICATION_TABLES - METRICS + MAX_PROCESSORS * AUTHENTICATION_WORDS
)


def fences() -> list[int]:
    """Return the offsets of the fences: words that no process writes after the start.

    These are the last word of every part of the control segment, and the word before
    the entries of a ring. A fence that has changed shows that a process wrote outside
    its words (canaries.py).
    """
    rings = [
        REQUEST_RING,
        COORDINATOR_RING,
        CONTROL_RING,
        *map(response_ring, range(MAX_PROCESSORS)),
        *map(notification_ring, range(HANDLER_IDS)),
    ]
    blocks = [
        REQUEST_RING,
        RESPONSE_RINGS,
        NOTIFICATION_RINGS,
        CELLS,
        PROCESSORS,
        HANDLERS,
        SLOTS,
        CONNECTIONS,
        COORDINATOR_RING,
        CONTROL_RING,
        METRICS,
        CONTROL_WORDS,
    ]
    return [block - 1 for block in blocks] + [ring + RING_FENCE for ring in rings]


def response_ring(processor: int) -> int:
    return RESPONSE_RINGS + processor * RESPONSE_RING_WORDS


def notification_ring(handler: int) -> int:
    return NOTIFICATION_RINGS + handler * NOTIFICATION_RING_WORDS


def cell(number: int) -> int:
    return CELLS + number * CELL_WORDS


def pulse_words(number: int) -> int:
    """Return where the pulse of a process without a row of its own begins."""
    return HEADER + HEADER_PULSES + number * PULSE_WORDS


def processor_row(processor: int) -> int:
    return PROCESSORS + processor * PROCESSOR_WORDS


def starved_handlers(words: memoryview, since_ns: int) -> dict[int, int]:
    """Return, by handler id, the bytes of answers that wait for shared memory.

    They wait for room in the handler's part of the arena. Handlers are left out if one
    of their answers has found room since ``since_ns``.

    Args:
        words: the words of the control segment.
        since_ns: a time on the monotonic clock.
    """
    first, end = HANDLERS, HANDLERS + HANDLER_IDS * HANDLER_WORDS
    starved = words[first + HANDLER_STARVED : end : HANDLER_WORDS].tolist()
    return {
        handler: words[handler_row(handler) + HANDLER_STARVED_BYTES]
        for handler, since in enumerate(starved)
        if 0 < since < since_ns
    }


def handler_row(handler: int) -> int:
    return HANDLERS + handler * HANDLER_WORDS


def slot_row(slot: int) -> int:
    return SLOTS + slot * SLOT_WORDS


def connection_row(connection: int) -> int:
    return CONNECTIONS + connection * CONNECTION_WORDS


def client_of(words: memoryview, row: int) -> int:
    """Return a number for a connection's client: an IPv4 address, or an IPv6 network.

    Args:
        words: the words of the control segment.
        row: the first word of the connection's row in it.
    """
    word = row + CONNECTION_PEER_ADDRESS
    network: int = words[word]
    # The first word of an IPv4 address in IPv6 form is 0.
    return network or words[word + 1]


def slots_in_use(words: memoryview, processor: int) -> range:
    """Return those slots of a processor that were ever used.

    A slot is the entry of one request in flight. The processor's other slots are FREE.
    """
    first = processor * SLOTS_PER_PROCESSOR
    used = words[processor_row(processor) + PROCESSOR_SLOTS_USED]
    return range(first, first + used)


# --- partition rows ---------------------------------------------------------------
# Written under the row's mutex; read by any process at any time.
#
#   word   field             notes
#   0-15   mutex             robust, process-shared
#   16     version           +1 commits the copy with the number version & 1
#   17     intent            slot + 1 of the append under way; 0: none
#   18     status            RowStatus
#   19     log start offset
#   20     structure         +1 whenever the list of segments changes
#   21     durable end       all offsets below are on disk (fdatasync)
#   22-23  waiters           mask of the handlers with a parked fetch on this partition
#   24-25  sync waiters      mask of the handlers to be notified of the next sync
#   26     sync owner        id + 1 of the process that syncs now; 0: none
#   27     bytes in before   LogState.bytes_in when the row became this partition's
#   28     bytes out before  the same of the bytes fetched
#   29     sync in doubt     1: an owner of a sync was killed, and may have been told
#                            of an error that no process is told of again
#   30     index sync        1: the housekeeper forces indexes to disk; or it was killed
#                            meanwhile, and may have been told of an error, likewise
#   32-47  copy 0            LogState, one word for each field
#   48-63  copy 1
ROW_MUTEX: Final = 0
ROW_VERSION: Final = 16
ROW_INTENT: Final = 17
ROW_STATUS: Final = 18
ROW_LOG_START_OFFSET: Final = 19
ROW_STRUCTURE: Final = 20
ROW_DURABLE_END: Final = 21
ROW_WAITERS: Final = 22
ROW_SYNC_WAITERS: Final = 24
ROW_SYNC_OWNER: Final = 26
ROW_BYTES_IN_BEFORE: Final = 27
ROW_BYTES_OUT_BEFORE: Final = 28
ROW_SYNC_IN_DOUBT: Final = 29
ROW_INDEX_SYNC: Final = 30
ROW_COPIES: Final = 32
ROW_COPY_WORDS: Final = 16
ROW_WORDS: Final = 64

MAX_PARTITIONS: Final = 131072  # 64 MiB of rows, 120 of fetched_bytes.py


class RowStatus(IntEnum):
    """The status of a partition, in its record in shared memory."""

    UNLOADED = 0  # the first process that uses it loads its log, under the mutex
    ONLINE = 1
    OFFLINE = 2  # its storage failed; nothing is appended any more
    DELETED = 3  # until the row is another partition's (row_users.py)
