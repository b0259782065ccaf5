"""What an SM has, and what of it a step uses: the constants that were tuned and the limits they must keep."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.step.isa import K_BLOCK, PAGE_BYTES_MAX, Opcode

SHARED_BYTES = 227 * 1024  # shared memory that a block may have (Hopper)
REGISTERS = 168 * 384  # of a block: 65536, shared out evenly in multiples of 8; setmaxnreg moves no others
WARP = 32
GROUP_THREADS = 128  # a warp group
CONSUMER_GROUPS = 2
CONSUMER_REGISTERS = 224  # a thread; setmaxnreg takes multiples of 8
OTHER_REGISTERS = 56  # a thread of the third group: loader, copier, publisher, helper
WORKING_REGISTERS = 88  # of CONSUMER_REGISTERS: accumulators, a page's fragments, addresses
MERGED_TILES = 4  # of one head, that ATTENTION_MERGE has at a time
TASK_SLOTS = 16  # descriptors that the loader may be ahead of the consumers
PACE_PLACES = 2  # of EXPERT_DOWN, where an SM learns how many are ahead of it (pace.h)
ORDER_PAGES = 2**16 - 1  # that one order of the loader names at most: two bytes (state.h)

# Pages under way of what is fetched ahead of need and yields: with up to 8 rows, and with more.
_YIELDING = {Opcode.ROUTER: (1, 1), Opcode.QKV_PROJ: (1, 1), Opcode.O_PROJ: (2, 1)}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants that measurement chose: docs/performance-log.md has what deeper rings and other caps brought.

    `ring_pages` pages of shared memory hold what was fetched ahead; of these `in_flight` may be under way,
    unless `in_flight_of` an operation says otherwise. The kernel keeps to less in a small ring, and takes
    none of fewer than 6 pages: MOST_IN_FLIGHT of ring.h.
    """

    ring_pages: int = 11
    in_flight: int = 3

    @property
    def ring_bytes(self) -> int:
        return self.ring_pages * PAGE_BYTES_MAX

    def in_flight_of(self, opcode: Opcode, rows: int, pages: int) -> int:
        """IN_FLIGHT of an operation's tasks: whole pages that may be under way while their own are fetched.

        `pages` is how many the fullest SM's task reads of a matrix, or of each expert's; 0 for attention.

        What fits a ring is there before it is needed, and takes memory from SMs that are behind: a QKV_PROJ's
        pages while these are still at the layer before, an O_PROJ's while they are at attention. So few of
        them go at a time. Of what does not fit, most is needed at once. Why EXPERT_UP does better with one
        more at 4 and 8 rows is not known: docs/performance-log.md has the measurement.
        """
        if pages <= self.ring_pages and opcode in _YIELDING:
            narrow, wide = _YIELDING[opcode]
            return min(wide if rows > 8 else narrow, self.in_flight)
        return self.in_flight + (opcode is Opcode.EXPERT_UP and 4 <= rows <= 8)


def activation_registers(k: int, rows: int, pages: int) -> int:
    """Registers a consumer thread holds its part of the activations of one tile in: bfloat16 [rows, k].

    Up to 4 rows four warps share each of a tile's `pages`, else all eight do. Up to 8 rows the other half
    of the tensor core's 16 rows is empty. A warp takes whole blocks of columns, so some may have one less.
    """
    warps, of_block = 4 if rows < 8 else 8, 4 if rows <= 8 else 8
    return pages * -(-(k // K_BLOCK // pages) // warps) * of_block
