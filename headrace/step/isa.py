"""The instruction set of a decode step: the one description that Python and the kernel's header share.

A plan is, for every SM, a list of descriptors of WORDS int32. `headrace.step.operations` says what each
operation reads, waits for, computes and signals; this module says how it is written down. The C++ header
`isa.h` is generated from it (`headrace.step.isa_header`).

Machine
    An SM has two agents, which walk its list in order, step after step. The loader waits for the loader
    counter, works out which pages a task reads (for expert and attention tasks from data), hands the task and
    this work list to the consumers, and copies the pages into the ring. The consumers take a task only after
    the loader handed it over, wait for the task's counters, compute, publish, and signal. So what the loader
    read for a task was read before the consumers began it. ATTENTION_MERGE has no pages and shares nothing
    with its neighbours in the list but counters: a machine may do it beside them, as soon as its counter lets
    it, and in the order of the layers; the kernel does.

Counters
    Every counter is one 32-bit word in global memory that only grows. A task that has finished and published
    adds SIGNAL_AMOUNT to SIGNAL_COUNTER. Counter 0 means none. With `epoch` the number of the step since the
    counters were zeroed, counted from 1 and across launches, a wait passes when

        int32(value - (epoch - lag) * arrivals) >= 0        in arithmetic modulo 2^32

    where `arrivals` is the sum of all that is added to the counter in one step. The lag is LOADER_LAG for the
    loader's wait, and 0 for the consumers'. A task with tiles of its own signals how many of them it made, so
    arrivals do not depend on how tiles are divided; a task that divides its work when it runs (SHARE of
    SHARES) signals 1, also when its share turns out empty.

Memory
    Weights are one array, addressed in units of UNIT bytes. Buffers are activations in global memory, or
    state that only one SM touches; `headrace.step.buffers` gives their shapes. Absent fields are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

from headrace.model.kv import BLOCK_TOKENS as BLOCK_TOKENS  # tokens in a KV block, so in a K or V page

WORDS = 32  # int32 words of a descriptor
UNIT = 512  # bytes that weight offsets count in: 8 rows by 32 columns of bfloat16
ELEMENT_BYTES = 2  # bfloat16
TILE_ROWS = 8  # output rows that are multiplied together: n of mma.sync.m16n8k16
K_BLOCK = 32  # columns that one lane's 16-byte load covers with its three neighbours: two k steps of 16
PAGE_BYTES_MAX = 16384
MAX_ROWS = 16
ROW_CAPACITIES = (1, 2, 4, 8, 16)

CHUNK_BLOCKS = 2  # KV blocks of an attention chunk, unless the row is long
MAX_CHUNKS = 64  # the most chunks, and so partial results, of one row and KV head

DIGIT_BITS = 8  # bits that one selection round of sampling settles
DIGIT_BINS = 1 << DIGIT_BITS
DIGITS = 4  # selection rounds that settle a float32
TOP_LOGPROBS = 20  # candidates for log-probabilities that every SM offers; MAX_LOGPROBS of sampling


class Opcode(IntEnum):
    """Field 0 of a descriptor. END fills up the lists to one length and ends a step."""

    END = 0
    EMBED = 1
    ROUTER = 2
    QKV_PROJ = 3
    ATTENTION = 4
    ATTENTION_MERGE = 5
    O_PROJ = 6
    EXPERT_UP = 7
    EXPERT_DOWN = 8
    FFN_UP = 9
    FFN_DOWN = 10
    LM_HEAD = 11
    SAMPLE_STATS = 12
    SAMPLE_SELECT = 13
    SAMPLE_PICK = 14
    SAMPLE_COMMIT = 15


class Buffer(IntEnum):
    """Where a task reads activations from or leaves its result; shapes are in `headrace.step.buffers`."""

    NONE = 0
    X = 1
    RESIDUAL = 2
    ROUTER_LOGITS = 3
    QKV = 4
    PARTIALS = 5
    ATTENTION_OUT = 6
    HIDDEN = 7
    SHARED_HIDDEN = 8
    LOGITS = 9
    STATS = 10
    HISTOGRAM = 11
    TIES = 12
    CANDIDATES = 13
    ROW_STATE = 14
    KV_PAGES = 15
    TOKEN_RING = 16


class Pairing(IntEnum):
    """ROPE of QKV_PROJ: how the elements of a head pair up, as in `headrace.model.config.Rope`."""

    NONE = 0
    INTERLEAVED = 1
    HALF_SPLIT = 2


class Flag(IntFlag):
    """FLAGS of a descriptor, one bit each."""

    NORMALIZE = 1  # divide a row's expert weights by their sum
    HALVE = 2  # add half of the result to the residual: shared and routed experts are averaged
    WRITER = 4  # this SM speaks for the step: writes the token ring, reads the stop flag


class Round(IntEnum):
    """ROUND of SAMPLE_SELECT. A digit round settles DIGIT_BITS of a threshold, the highest first."""

    TOP_K_DIGIT_0 = 0
    TOP_K_DIGIT_1 = 1
    TOP_K_DIGIT_2 = 2
    TOP_K_DIGIT_3 = 3
    TOP_K_TIES = 4
    TOP_P_DIGIT_0 = 5
    TOP_P_DIGIT_1 = 6
    TOP_P_DIGIT_2 = 7
    TOP_P_DIGIT_3 = 8
    TOP_P_TIES = 9


class Field(IntEnum):
    """The words of a descriptor; `FIELDS` gives their meaning and range, `USED` who uses which."""

    OPCODE = 0
    LAYER = 1
    FIRST_TILE = 2
    TILE_COUNT = 3
    K = 4
    PAGES_PER_TILE = 5
    PAGE_BYTES = 6
    WEIGHTS = 7
    EXPERT_STRIDE = 8
    EXPERTS = 9
    TOP_K = 10
    SHARE = 11
    SHARES = 12
    NORM = 13
    INPUT = 14
    OUTPUT = 15
    WAIT_COUNTER = 16
    WAIT_ARRIVALS = 17
    WAIT_SPAN = 18
    SECOND_COUNTER = 19
    SECOND_ARRIVALS = 20
    LOADER_COUNTER = 21
    LOADER_ARRIVALS = 22
    LOADER_LAG = 23
    SIGNAL_COUNTER = 24
    SIGNAL_AMOUNT = 25
    KV_HEAD = 26
    WINDOW = 27
    ROPE = 28
    ROUND = 29
    FLAGS = 30
    IN_FLIGHT = 31


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """What a field means, and the values that it may have where it is used (both ends included)."""

    meaning: str
    low: int
    high: int


_BIG = 2**31 - 1
_COUNTERS = 2**20

FIELDS: dict[Field, FieldInfo] = {
    Field.OPCODE: FieldInfo("the operation", 0, len(Opcode) - 1),
    Field.LAYER: FieldInfo("the model's layer", 0, 4095),
    Field.FIRST_TILE: FieldInfo("the first of this task's output tiles", 0, _BIG),
    Field.TILE_COUNT: FieldInfo(
        "how many output tiles the task makes; EXPERT_UP: tiles of one expert", 0, _BIG
    ),
    Field.K: FieldInfo("columns of the weights: elements that a dot product sums", K_BLOCK, _BIG),
    Field.PAGES_PER_TILE: FieldInfo("pages of a tile (of one expert)", 1, 65535),
    Field.PAGE_BYTES: FieldInfo("bytes of each page", UNIT, PAGE_BYTES_MAX),
    Field.WEIGHTS: FieldInfo(
        "where FIRST_TILE begins (of expert 0; EMBED: tile 0), in units of UNIT bytes", 0, _BIG
    ),
    Field.EXPERT_STRIDE: FieldInfo("from one expert's matrix to the next, in units of UNIT bytes", 1, _BIG),
    Field.EXPERTS: FieldInfo("how many experts there are", 1, 65535),
    Field.TOP_K: FieldInfo("how many experts a row is routed to", 1, 65535),
    Field.SHARE: FieldInfo("which part of the work is this task's, from 0", 0, 65535),
    Field.SHARES: FieldInfo("how many parts there are", 1, 65535),
    Field.NORM: FieldInfo("index of the norm that the input goes through", 0, 8191),
    Field.INPUT: FieldInfo("buffer that is read", 1, len(Buffer) - 1),
    Field.OUTPUT: FieldInfo("buffer that is written", 1, len(Buffer) - 1),
    Field.WAIT_COUNTER: FieldInfo("counter that the consumers wait for; 0: none", 0, _COUNTERS),
    Field.WAIT_ARRIVALS: FieldInfo("what a step adds to it", 0, _BIG),
    Field.WAIT_SPAN: FieldInfo("counters from WAIT_COUNTER on, one for each KV head", 1, 65535),
    Field.SECOND_COUNTER: FieldInfo("another counter to wait for; 0: none", 0, _COUNTERS),
    Field.SECOND_ARRIVALS: FieldInfo("what a step adds to it", 0, _BIG),
    Field.LOADER_COUNTER: FieldInfo(
        "counter that the loader waits for before the pages; 0: none", 0, _COUNTERS
    ),
    Field.LOADER_ARRIVALS: FieldInfo("what a step adds to it", 0, _BIG),
    Field.LOADER_LAG: FieldInfo("0: this step's arrivals; 1: those of the step before", 0, 1),
    Field.SIGNAL_COUNTER: FieldInfo("counter that is signalled at the end; 0: none", 0, _COUNTERS),
    Field.SIGNAL_AMOUNT: FieldInfo("what is added to it", 0, _BIG),
    Field.KV_HEAD: FieldInfo("the KV head whose group these tiles belong to", 0, 65535),
    Field.WINDOW: FieldInfo("tokens that a query sees, itself included; 0: all", 0, _BIG),
    Field.ROPE: FieldInfo("a Pairing", 0, len(Pairing) - 1),
    Field.ROUND: FieldInfo("a Round", 0, len(Round) - 1),
    Field.FLAGS: FieldInfo("Flag bits", 0, 7),
    Field.IN_FLIGHT: FieldInfo("whole pages whose bytes may be under way while its own are fetched", 1, 255),
}

_TILES = (Field.FIRST_TILE, Field.TILE_COUNT)
_PAGES = (Field.K, Field.PAGES_PER_TILE, Field.PAGE_BYTES, Field.WEIGHTS)
_FETCHED = (*_PAGES, Field.IN_FLIGHT)
_INOUT = (Field.INPUT, Field.OUTPUT)
_WAIT = (Field.WAIT_COUNTER, Field.WAIT_ARRIVALS)
_SECOND = (Field.SECOND_COUNTER, Field.SECOND_ARRIVALS)
_LOADER = (Field.LOADER_COUNTER, Field.LOADER_ARRIVALS, Field.LOADER_LAG)
_SIGNAL = (Field.SIGNAL_COUNTER, Field.SIGNAL_AMOUNT)
_SHARE = (Field.SHARE, Field.SHARES)
_EXPERTS = (Field.EXPERT_STRIDE, Field.EXPERTS, Field.TOP_K)
_GEMM = (Field.LAYER, *_TILES, *_FETCHED, *_INOUT, *_WAIT, *_SIGNAL)
_SAMPLE = (*_SHARE, *_INOUT, *_WAIT, *_SIGNAL)

# The fields of every operation besides OPCODE; all others must be 0.
USED: dict[Opcode, tuple[Field, ...]] = {
    Opcode.END: (),
    Opcode.EMBED: (*_TILES, *_PAGES, Field.OUTPUT, *_SIGNAL),
    Opcode.ROUTER: (*_GEMM, Field.NORM, Field.EXPERTS),
    Opcode.QKV_PROJ: (*_GEMM, Field.NORM, Field.KV_HEAD, Field.ROPE, Field.WINDOW),
    Opcode.ATTENTION: (
        Field.LAYER, *_SHARE, *_INOUT, *_WAIT, Field.WAIT_SPAN, *_LOADER, *_SIGNAL,
        Field.PAGE_BYTES, Field.IN_FLIGHT, Field.WINDOW,
    ),
    Opcode.ATTENTION_MERGE: (Field.LAYER, *_TILES, *_INOUT, *_WAIT, *_SIGNAL, Field.WINDOW),
    Opcode.O_PROJ: _GEMM,
    Opcode.EXPERT_UP: (*_GEMM, *_SECOND, *_LOADER, *_EXPERTS, *_SHARE, Field.NORM),
    Opcode.EXPERT_DOWN: (*_GEMM, *_SECOND, *_LOADER, *_EXPERTS, Field.FLAGS),
    Opcode.FFN_UP: (*_GEMM, Field.NORM),
    Opcode.FFN_DOWN: (*_GEMM, Field.FLAGS),
    Opcode.LM_HEAD: (*_TILES, *_FETCHED, *_INOUT, *_WAIT, Field.NORM),
    Opcode.SAMPLE_STATS: (*_TILES, *_SAMPLE),
    Opcode.SAMPLE_SELECT: (*_TILES, *_SAMPLE, Field.ROUND),
    Opcode.SAMPLE_PICK: (*_TILES, *_SAMPLE, *_SECOND, Field.FLAGS),
    Opcode.SAMPLE_COMMIT: (*_SAMPLE, Field.FLAGS),
}  # fmt: skip

# Operations whose work is divided when they run: every SM has one in each layer.
DYNAMIC = frozenset({Opcode.ATTENTION, Opcode.EXPERT_UP})
SAMPLING = frozenset({Opcode.SAMPLE_STATS, Opcode.SAMPLE_SELECT, Opcode.SAMPLE_PICK, Opcode.SAMPLE_COMMIT})
