"""What a cost model must know of a plan: how many pages every task has, and who waits for whom.

Also the skeleton of a step that was measured before the kernel existed, to hold the model against.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from headrace.step.cost import Costs, Event, Work
from headrace.step.division import attention_items, chunks_of, share_of
from headrace.step.isa import PAGE_BYTES_MAX, Field, Opcode
from headrace.step.limit import distinct_experts
from headrace.step.plan import Plan

_GEMMS = (
    Opcode.ROUTER, Opcode.QKV_PROJ, Opcode.O_PROJ, Opcode.FFN_UP, Opcode.FFN_DOWN, Opcode.LM_HEAD
)  # fmt: skip


def plan_works(plan: Plan, *, context: int, steps: int = 2) -> list[list[Work]]:
    """The tasks of `steps` steps, with all rows active and `context` tokens each.

    Routing is uniform: as many experts are active as are expected to be. Rows are greedy, so that the rounds
    of selection are passed over. The last step is one in the midst of many.
    """
    count_pages = PageCounts(plan, [context - 1] * plan.sizes.rows)
    works: list[list[Work]] = []
    for sm in range(plan.sizes.sms):
        tasks = [words.tolist() for words in plan.tasks(sm)]
        counts = [count_pages(words) for words in tasks]
        works.append(
            [
                _work(words, count, step)
                for step in range(steps)
                for words, count in zip(tasks, counts, strict=True)
            ]
        )
    return works


class PageCounts:
    """How many pages a task reads when its rows are at `positions` and routing is uniform."""

    def __init__(self, plan: Plan, positions: Sequence[int]) -> None:
        self._positions = positions
        self._kv_heads = plan.sizes.kv_heads
        self._attention = lru_cache(maxsize=None)(self._attention_pages)

    def __call__(self, words: Sequence[int]) -> int:
        opcode = Opcode(words[Field.OPCODE])
        tiles, per_tile = words[Field.TILE_COUNT], words[Field.PAGES_PER_TILE]
        if opcode in _GEMMS:
            return tiles * per_tile
        share, shares = words[Field.SHARE], words[Field.SHARES]
        if opcode is Opcode.ATTENTION:
            return self._attention(words[Field.WINDOW], share, shares)
        if opcode is Opcode.EXPERT_UP:
            return len(share_of(self._experts(words) * tiles, share, shares)) * per_tile
        if opcode is Opcode.EXPERT_DOWN:
            return self._experts(words) * tiles * per_tile
        return 0

    def _experts(self, words: Sequence[int]) -> int:
        return round(distinct_experts(words[Field.EXPERTS], words[Field.TOP_K], len(self._positions)))

    def _attention_pages(self, window: int, share: int, shares: int) -> int:
        items = attention_items(self._positions, self._kv_heads, window, share, shares)
        blocks = [chunks_of(self._positions[item.row], window).blocks(item.chunk) for item in items]
        return 2 * sum(len(each) for each in blocks)


def _work(words: Sequence[int], pages: int, step: int) -> Work:
    opcode = Opcode(words[Field.OPCODE])
    skipped = opcode is Opcode.SAMPLE_SELECT
    loader, arrivals = words[Field.LOADER_COUNTER], words[Field.LOADER_ARRIVALS]
    first = (words[Field.WAIT_COUNTER], words[Field.WAIT_ARRIVALS], words[Field.WAIT_SPAN])
    second = (words[Field.SECOND_COUNTER], words[Field.SECOND_ARRIVALS])
    signal = words[Field.SIGNAL_COUNTER]
    return Work(
        name=opcode.name,
        layer=words[Field.LAYER],
        step=step,
        pages=pages,
        page_bytes=words[Field.PAGE_BYTES],
        waits=() if skipped else _waits(step, first, second),
        loader=Event(step - words[Field.LOADER_LAG], loader, arrivals) if loader else None,
        chooses=opcode in (Opcode.EXPERT_UP, Opcode.EXPERT_DOWN),
        signal=(signal, words[Field.SIGNAL_AMOUNT]) if signal else None,
        publishes=bool(signal) and not skipped and opcode is not Opcode.SAMPLE_COMMIT,
    )


@lru_cache(maxsize=4096)
def _waits(step: int, first: tuple[int, int, int], second: tuple[int, int]) -> tuple[Event, ...]:
    """The events of WAIT_COUNTER, WAIT_ARRIVALS and WAIT_SPAN, and of the second wait; SMs share them."""
    counter, arrivals, span = first
    events = [Event(step, counter + number, arrivals) for number in range(max(1, span))] if counter else []
    if second[0]:
        events.append(Event(step, *second))
    return tuple(events)


# The skeleton: one step of North with 8K of context, without epilogues, on 132 SMs.
SKELETON_SMS = 132
SKELETON_LAYERS = 49
SKELETON_ORDERS = (
    ("QKV_PROJ", "ATTENTION", "EXPERT_UP", "O_PROJ", "EXPERT_DOWN"),
    ("QKV_PROJ", "ATTENTION", "O_PROJ", "EXPERT_UP", "EXPERT_DOWN"),
    ("QKV_PROJ", "EXPERT_UP", "ATTENTION", "O_PROJ", "EXPERT_DOWN"),
)
SKELETON_COSTS = Costs(held=True, blocking=True)
_ROUTERS = 32  # SMs whose first page of QKV stands for the router
_HEAD_PAGES = 65536


def skeleton_works(order: int = 0, rows: int = 1) -> list[list[Work]]:
    """The skeleton's lists, for `rows` rows and one of its orders of a layer's segments.

    Every segment's pages are divided evenly. QKV waits for the layer before, attention for QKV, O for
    attention, down for up; the pages of up wait for the router.
    """
    return [_skeleton_sm(sm, order, rows) for sm in range(SKELETON_SMS)]


def _skeleton_sm(sm: int, order: int, rows: int) -> list[Work]:
    experts = 128 * (1 - (120 / 128) ** rows)
    works: list[Work] = []
    for layer in range(SKELETON_LAYERS):
        pages = {
            "QKV_PROJ": 1312,
            "ATTENTION": (512 if layer % 4 else 1024) * rows,
            "EXPERT_UP": int(384 * experts),
            "O_PROJ": 1024,
            "EXPERT_DOWN": int(192 * experts),
        }
        counters = {name: 1 + 8 * layer + number for number, name in enumerate(pages)}
        router = 8 * (layer + 1) - 1
        needs = {
            "ATTENTION": counters["QKV_PROJ"],
            "O_PROJ": counters["ATTENTION"],
            "EXPERT_DOWN": counters["EXPERT_UP"],
        }
        if layer:
            needs["QKV_PROJ"] = counters["EXPERT_DOWN"] - 8
        for name in SKELETON_ORDERS[order]:
            own = len(share_of(pages[name], sm, SKELETON_SMS))
            waits = (Event(0, needs[name], SKELETON_SMS),) if name in needs else ()
            if name == "QKV_PROJ" and sm < _ROUTERS:
                works.append(
                    Work("ROUTER", layer, 0, 1, PAGE_BYTES_MAX, waits, signal=(router, 1), publishes=True)
                )
                own, waits = own - 1, ()
            works.append(
                Work(
                    name,
                    layer,
                    0,
                    own,
                    PAGE_BYTES_MAX,
                    waits,
                    loader=Event(0, router, _ROUTERS) if name == "EXPERT_UP" else None,
                    chooses=name == "EXPERT_UP",
                    signal=None if name == "O_PROJ" else (counters[name], 1),
                    publishes=name != "O_PROJ",
                )
            )
    head = len(share_of(_HEAD_PAGES, sm, SKELETON_SMS))
    works.append(Work("LM_HEAD", SKELETON_LAYERS, 0, head, PAGE_BYTES_MAX))
    return works
