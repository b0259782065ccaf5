"""Which regions of memory a task reads and writes, by its descriptor.

A region is what is written and read as a whole: most buffers are one, QKV is one for each KV head, HISTOGRAM
one for each digit round and TIES one for each of its two. Memory that only one SM touches is left to
`coverage`, except ROW_STATE, which an SM's loader reads while its consumers write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.step.isa import DIGITS, Buffer, Field, Opcode, Round
from headrace.step.plan import Words

Region = tuple[Buffer, int]

_EXCHANGE = frozenset(
    {
        Buffer.X,
        Buffer.ROUTER_LOGITS,
        Buffer.PARTIALS,
        Buffer.ATTENTION_OUT,
        Buffer.HIDDEN,
        Buffer.SHARED_HIDDEN,
        Buffer.STATS,
        Buffer.CANDIDATES,
    }
)
_LOADER_READS_ROWS = frozenset({Opcode.ATTENTION, Opcode.EXPERT_UP, Opcode.EXPERT_DOWN})


@dataclass(frozen=True, slots=True)
class Accesses:
    """What a task touches: read by its loader, read by its consumers, written by its consumers.

    `heads` counts KV heads of QKV that are read, each after its own wait. `keys` says whether the loader
    reads the KV pages of earlier steps, `appends` whether this step's are written; `loader_rows` whether the
    loader reads its SM's copy of ROW_STATE, `commits` whether the consumers change that.
    """

    loader: tuple[Region, ...] = ()
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    heads: int = 0
    keys: bool = False
    appends: bool = False
    loader_rows: bool = False
    commits: bool = False


def accesses(words: Words) -> Accesses:
    """What the task of this descriptor touches."""
    opcode = Opcode(words[Field.OPCODE])
    inputs = _plain(words, Field.INPUT)
    outputs = _plain(words, Field.OUTPUT)
    loader_rows = opcode in _LOADER_READS_ROWS
    if opcode is Opcode.QKV_PROJ:
        return Accesses(reads=inputs, writes=((Buffer.QKV, int(words[Field.KV_HEAD])),), appends=True)
    if opcode is Opcode.ATTENTION:
        heads = int(words[Field.WAIT_SPAN])
        return Accesses(writes=outputs, heads=heads, keys=True, loader_rows=loader_rows)
    if opcode in (Opcode.EXPERT_UP, Opcode.EXPERT_DOWN):
        logits: tuple[Region, ...] = ((Buffer.ROUTER_LOGITS, 0),)
        reads = inputs + (logits if opcode is Opcode.EXPERT_DOWN else ())
        return Accesses(loader=logits, reads=reads, writes=outputs, loader_rows=loader_rows)
    if opcode is Opcode.SAMPLE_SELECT:
        return _select(Round(words[Field.ROUND]))
    if opcode is Opcode.SAMPLE_PICK:
        ties: Region = (Buffer.TIES, 1)
        return Accesses(reads=((Buffer.STATS, 0), ties), writes=outputs)
    if opcode is Opcode.SAMPLE_COMMIT:
        cleared = tuple((Buffer.HISTOGRAM, digit) for digit in range(2 * DIGITS))
        return Accesses(reads=inputs, writes=cleared, commits=True)
    return Accesses(reads=inputs, writes=outputs)


def _plain(words: Words, field: Field) -> tuple[Region, ...]:
    buffer = Buffer(words[field])
    return ((buffer, 0),) if buffer in _EXCHANGE else ()


def _select(number: Round) -> Accesses:
    """A round reads the last one's result, besides STATS, and writes its own."""
    results: Sequence[Region] = (
        *((Buffer.HISTOGRAM, digit) for digit in range(DIGITS)),
        (Buffer.TIES, 0),
        *((Buffer.HISTOGRAM, DIGITS + digit) for digit in range(DIGITS)),
        (Buffer.TIES, 1),
    )
    before = (results[number - 1],) if number else ()
    return Accesses(reads=((Buffer.STATS, 0), *before), writes=(results[number],))
