"""What a pass over a prompt's chunk begins with, and where that time goes: `time_prefill --beginnings`.

The first layer is run alone, as it may be beside running answers. Where a count of tokens is `new`, no pass
of as many has come before; then come the same `again`, after a time in which nothing is run (`idle`) or in
which the host looks every 10 us whether anything is (`polling`, as beside the decode kernel), and with
another thread that runs Python (`beside Python`), as a server's event loop may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from headrace.engine.torch_backend import TorchBackend
from headrace.model.batch import Span
from headrace.model.kv import BlockTables
from headrace.model.transformer import Model

TOKENS = (500, 1200, 3000, 4000, 7800, 8192)
PASTS = (0, 40_000, 123_000)
TURN = (
    137,
    4321,
    601,
    2999,
    263,
    7001,
    1511,
    5003,
    389,
    6007,
    433,
    3511,
)  # counts that come one after another
MOST = max(PASTS) + max(TOKENS)
IDLE = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Beginning:
    """Milliseconds of a pass's first layer, of the host but for `gpu`.

    `plan` until the layer is entered, `launch` in it, and of this `products` in the calls of dense products;
    `wait` for the GPU at its end. `gpu` is from the layer's first kernel to its last, NaN without a GPU. For
    `off` of the whole the thread was not running. `allocations` counts those that went to the driver.
    """

    plan: float
    launch: float
    products: float
    wait: float
    gpu: float
    off: float
    allocations: int

    @property
    def whole(self) -> float:
        return self.plan + self.launch + self.wait

    def __str__(self) -> str:
        return (
            f"{self.whole:6.1f} ms: plan {self.plan:.1f}, launch {self.launch:.1f}, of this products "
            f"{self.products:.1f}, wait {self.wait:.1f}; GPU {self.gpu:.1f}, off the CPU {self.off:.1f}, "
            f"{self.allocations} allocations"
        )


class Watch:
    """Times the first layer of a model as it runs."""

    def __init__(self, model: Model) -> None:
        first = model.blocks[0]
        assert isinstance(first, nn.Module)
        self._cuda = model.device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in "be"] if self._cuda else []  # type: ignore[no-untyped-call]
        self._entered = self._left = self._products = self._called = 0.0
        first.register_forward_pre_hook(self._enter, prepend=True)
        first.register_forward_hook(self._leave)
        for module in first.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._call)
                module.register_forward_hook(self._return)

    def time(self, backend: TorchBackend, span: Span) -> Beginning:
        """Run the first layer of a pass, which is given up then."""
        self._products, allocated = 0.0, self._allocations()
        begun, running = time.perf_counter(), time.thread_time()
        backend.begin([span])(1)
        ended, ran = time.perf_counter(), time.thread_time() - running
        return Beginning(
            plan=1e3 * (self._entered - begun),
            launch=1e3 * (self._left - self._entered),
            products=1e3 * self._products,
            wait=1e3 * (ended - self._left),
            gpu=self._events[0].elapsed_time(self._events[1]) if self._cuda else float("nan"),
            off=1e3 * (ended - begun - ran),
            allocations=self._allocations() - allocated,
        )

    def _allocations(self) -> int:
        return int(torch.cuda.memory_stats()["num_device_alloc"]) if self._cuda else 0

    def _enter(self, *_: object) -> None:
        self._entered = time.perf_counter()
        if self._cuda:
            self._events[0].record()

    def _leave(self, *_: object) -> None:
        if self._cuda:
            self._events[1].record()
        self._left = time.perf_counter()

    def _call(self, *_: object) -> None:
        self._called = time.perf_counter()

    def _return(self, *_: object) -> None:
        self._products += time.perf_counter() - self._called


def report(
    backend: TorchBackend,
    model: Model,
    prompt: Sequence[int],
    tables: BlockTables,
    *,
    tokens: Sequence[int] = TOKENS,
    pasts: Sequence[int] = PASTS,
    turn: Sequence[int] = TURN,
    idle: float = IDLE,
) -> None:
    """Print the beginnings of passes over `tokens` tokens of the prompt after `pasts`, in all the ways.

    A token is added for each past before, so that counts are new there, too, but for those of 8192.
    Then come new counts in turn: what is loaded once for many counts gets less.
    """
    watch = Watch(model)

    def timed(count: int, past: int) -> Beginning:
        return watch.time(backend, Span(prompt[past : past + count], past, tables))

    for index, past in enumerate(pasts):
        for wanted in tokens:
            count = wanted if wanted % 1024 == 0 else wanted + index
            for way, before, beside in ways(idle):
                before()
                with busy_thread(beside):
                    beginning = timed(count, past)
                print(f"{count:5d} tokens after {past:6d}, {way:13s}: {beginning}", flush=True)
    print(f"counts that are new, products' ms at {pasts[-1]}: ", end="")
    print(", ".join(f"{count}: {timed(count, pasts[-1]).products:.1f}" for count in turn))


def ways(idle: float) -> list[tuple[str, Callable[[], None], bool]]:
    """What a pass is called, what comes before it, and whether another thread runs beside it."""

    def nothing() -> None:
        pass

    return [
        ("new", nothing, False),
        ("again", nothing, False),
        ("idle", lambda: time.sleep(idle), False),
        ("polling", lambda: poll(idle), False),
        ("beside Python", nothing, True),
    ]


def poll(seconds: float) -> None:
    """Look at the clock every 10 us."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        time.sleep(10e-6)


@contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """With another thread that runs Python, if that is wanted: it keeps the interpreter until it is asked to
    let go of it, 5 ms each time."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            pass

    thread = threading.Thread(target=work, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if wanted:
            thread.join()
