"""Timelines for people: a trace for Perfetto, and a picture.

Both show, for every SM, two lanes: what its loader has under way, and what its consumers do. Where the
consumers' lane is empty, they wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from headrace.step.cost import DATASHEET_BANDWIDTH, Span, Timeline
from headrace.step.svg import FAINT, RULE, TEXT, bar, opening, text

# Colours that stay apart for colour-blind eyes (Paul Tol's bright and muted schemes).
COLOURS = {
    "ROUTER": "#332288",
    "QKV_PROJ": "#4477aa",
    "ATTENTION": "#66ccee",
    "EXPERT_UP": "#228833",
    "FFN_UP": "#228833",  # the same part of a layer, and so the same colour; likewise FFN_DOWN
    "ATTENTION_MERGE": "#aa3377",
    "O_PROJ": "#ccbb44",
    "EXPERT_DOWN": "#ee6677",
    "FFN_DOWN": "#ee6677",
    "LM_HEAD": "#7a68a6",
    "EMBED": "#333333",
}
SAMPLING = "#333333"
_LOADING = 0.55  # opacity of the loader's lane
_IDLE = "#f1f1ee"


def colour(name: str) -> str:
    """Of an operation."""
    return COLOURS.get(name, SAMPLING)


def write_trace(timeline: Timeline, file: TextIO) -> None:
    """The last step as Perfetto's JSON (the Trace Event Format): a process an SM, a thread a lane.

    Open it at ui.perfetto.dev.
    """
    file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
    for number, event in enumerate(_events(timeline)):
        file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")


def _events(timeline: Timeline) -> Iterator[dict[str, object]]:
    for sm, spans in enumerate(timeline.spans):
        yield {"ph": "M", "pid": sm, "name": "process_name", "args": {"name": f"SM {sm}"}}
        yield {"ph": "M", "pid": sm, "name": "process_sort_index", "args": {"sort_index": sm}}
        for thread, lane in enumerate(("loader", "consumers")):
            yield {"ph": "M", "pid": sm, "tid": thread, "name": "thread_name", "args": {"name": lane}}
        for span in spans:
            work = span.work
            if work.step < timeline.steps - 1:
                continue
            arguments = {"step": work.step, "layer": work.layer, "pages": work.pages}
            arguments["bytes"] = work.pages * work.page_bytes
            if work.pages:
                yield _complete(sm, 0, work.name, span.loading, arguments)
            if span.begin > span.waiting:
                yield _complete(sm, 1, f"wait for {work.name}", (span.waiting, span.begin), arguments)
            yield _complete(sm, 1, work.name, (span.begin, span.end), arguments)


def _complete(
    sm: int, thread: int, name: str, when: tuple[float, float], arguments: dict[str, int]
) -> dict[str, object]:
    begin, end = when
    return {
        "ph": "X",
        "pid": sm,
        "tid": thread,
        "name": name,
        "ts": round(begin, 3),
        "dur": round(end - begin, 3),
        "args": arguments,
    }


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of the picture: a stretch of time (microseconds) of some SMs, at a height on the page."""

    top: float
    begin: float
    end: float
    sms: Sequence[int]
    lane: float  # height of one

    left: float = 70.0
    width: float = 1080.0

    def x(self, time: float) -> float:
        inside = min(max(time, self.begin), self.end)
        return self.left + (inside - self.begin) / (self.end - self.begin) * self.width

    def y(self, place: int) -> float:
        """The top of an SM's two lanes."""
        return self.top + place * (2 * self.lane + 6)

    @property
    def bottom(self) -> float:
        return self.y(len(self.sms)) - 6


def write_picture(
    timeline: Timeline, file: TextIO, *, title: str, layer: int = 4, words: str | None = None
) -> None:
    """An SVG: the last step as a whole on a few SMs, and the layers from `layer` on at close range.

    Below the title stand `words`, or what was predicted. The ring is drawn where its pages are known.
    """
    sms = _spread(len(timeline.spans), 4)
    begin, step = timeline.begin, timeline.steps - 1
    whole = Panel(138, begin, timeline.end_of(step), sms, 9)
    close = Panel(whole.bottom + 92, *_stretch(timeline, layer), _spread(len(timeline.spans), 8), 9)
    ring = Panel(close.bottom + 74, close.begin, close.end, close.sms[1:2] or close.sms, 24)
    fills = any(timeline.landings)
    height = (ring.bottom if fills else close.bottom) + 46
    file.write(opening(1180, height))
    file.write(text(20, 34, title, size=19, weight="bold"))
    file.write(text(20, 58, words or verdict(timeline), size=13, fill=FAINT))
    names = {span.work.name for spans in timeline.spans for span in spans}
    file.writelines(_legend(names))
    lanes = "upper lane of each SM: its loader; lower lane: its consumers"
    file.write(_heading(whole, "The whole step", lanes))
    file.writelines(_silhouette(timeline, whole))
    file.write(_marker(whole, close.begin, close.end))
    last = min(layer + 1, max(span.work.layer for span in timeline.spans[0]))
    shown = f"Layer {layer}" if layer == last else f"Layers {layer} and {last}"
    file.write(_heading(close, f"{shown} at close range", lanes))
    file.writelines(_lanes(timeline, close))
    if fills:
        heading = f"Pages in the ring of SM {ring.sms[0]}"
        file.write(_heading(ring, heading, "blue: landed, waiting for its use or in use; grey: under way"))
        file.writelines(_fill(timeline, ring))
    file.write("</svg>\n")


def verdict(timeline: Timeline) -> str:
    """The prediction in one line."""
    size = timeline.bytes_of(timeline.steps - 1)
    limit = size / DATASHEET_BANDWIDTH
    return (
        f"Predicted {timeline.step_time / 1000:.3f} ms a step for {size / 1e9:.2f} GB: "
        f"{timeline.share:.1%} of the bandwidth limit ({limit / 1000:.3f} ms at "
        f"{DATASHEET_BANDWIDTH / 1e6:.1f} TB/s)"
    )


def _spread(total: int, count: int) -> list[int]:
    """A few SMs from among all."""
    if total <= count:
        return list(range(total))
    return [round(place * (total - 1) / (count - 1)) for place in range(count)]


def _stretch(timeline: Timeline, layer: int) -> tuple[float, float]:
    """When the last step is at `layer` and the one after it."""
    step = timeline.steps - 1
    spans = [span for spans in timeline.spans for span in spans if span.work.step == step]
    sampled = ("EMBED", "LM_HEAD")
    inside = [
        span
        for span in spans
        if layer <= span.work.layer <= layer + 1
        and span.work.name not in sampled
        and not span.work.name.startswith("SAMPLE")
    ]
    return min(span.waiting for span in inside), max(span.end for span in inside)


def _lanes(timeline: Timeline, panel: Panel) -> Iterator[str]:
    yield from _axis(panel)
    for place, sm in enumerate(panel.sms):
        top = panel.y(place)
        yield text(panel.left - 8, top + panel.lane + 4, f"SM {sm}", anchor="end", fill=FAINT)
        yield bar(panel.left, top + panel.lane, panel.width, panel.lane, _IDLE)
        for span in timeline.spans[sm]:
            yield from _span(span, panel, top)


def _silhouette(timeline: Timeline, panel: Panel) -> Iterator[str]:
    """As _lanes, all bars of a colour in one path: there are thousands."""
    yield from _axis(panel)
    bars: dict[tuple[str, float], list[str]] = {}
    for place, sm in enumerate(panel.sms):
        top = panel.y(place)
        yield text(panel.left - 8, top + panel.lane + 4, f"SM {sm}", anchor="end", fill=FAINT)
        yield bar(panel.left, top + panel.lane, panel.width, panel.lane, _IDLE)
        for span in timeline.spans[sm]:
            lanes = [(span.loading, top, _LOADING)] if span.work.pages else []
            for (begin, end), y, opacity in [*lanes, ((span.begin, span.end), top + panel.lane, 1.0)]:
                if end > panel.begin:
                    x = panel.x(begin)
                    shape = f"M{x:.1f} {y:g}h{panel.x(end) - x:.1f}v{panel.lane:g}H{x:.1f}z"
                    bars.setdefault((colour(span.work.name), opacity), []).append(shape)
    for (hue, opacity), shapes in bars.items():
        yield f'<path fill="{hue}" fill-opacity="{opacity}" d="{"".join(shapes)}"/>\n'


def _span(span: Span, panel: Panel, top: float) -> Iterator[str]:
    """The bars of a task, with a label that shows under the pointer."""
    work = span.work
    label = f"{work.name} of layer {work.layer}" + (f": {work.pages} pages" if work.page_bytes else "")
    if work.pages and span.loading[1] > panel.begin and span.loading[0] < panel.end:
        x = panel.x(span.loading[0])
        yield bar(
            x, top, panel.x(span.loading[1]) - x, panel.lane, colour(work.name), label, opacity=_LOADING
        )
    if span.end > panel.begin and span.begin < panel.end:
        x = panel.x(span.begin)
        width = max(panel.x(span.end) - x, 0.6)
        yield bar(x, top + panel.lane, width, panel.lane, colour(work.name), label)


def _axis(panel: Panel) -> Iterator[str]:
    for tick in _ticks(panel.end - panel.begin):
        x = panel.x(panel.begin + tick)
        yield f'<path d="M{x:.1f} {panel.top - 4:.1f}V{panel.bottom + 4:.1f}" stroke="{RULE}"/>\n'
        yield text(x, panel.bottom + 18, f"{tick:g} µs", anchor="middle", fill=FAINT, size=11)


def _ticks(length: float) -> list[float]:
    """Round times from 0 up, eight or so."""
    step = next(
        base * 10**power for power in range(-1, 6) for base in (1, 2, 5) if base * 10**power >= length / 9
    )
    return [number * step for number in range(int(length / step) + 1)]


def _fill(timeline: Timeline, panel: Panel) -> Iterator[str]:
    """How many pages of one SM are in its ring, over time."""
    yield from _axis(panel)
    sm, top, height = panel.sms[0], panel.top, 2 * panel.lane
    scale = height / timeline.ring_pages
    yield text(panel.left - 8, top + 9, str(timeline.ring_pages), anchor="end", fill=FAINT, size=11)
    yield text(panel.left - 8, top + height + 2, "0", anchor="end", fill=FAINT, size=11)
    yield f'<path d="M{panel.left} {top:.1f}h{panel.width}" stroke="{FAINT}" stroke-dasharray="2 3"/>\n'
    for begins, hue in ((timeline.issues[sm], "#c9c4b5"), (timeline.landings[sm], "#4477aa")):
        yield _area(_level(begins, timeline.releases[sm], panel), panel, top + height, scale, hue)


def _level(begins: Sequence[float], ends: Sequence[float], panel: Panel) -> list[tuple[float, int]]:
    """(time, how many) whenever the number of intervals that are open changes within the panel."""
    changes = sorted([(time, 1) for time in begins] + [(time, -1) for time in ends])
    level, steps = 0, [(panel.begin, 0)]
    for time, change in changes:
        level += change
        if time <= panel.begin:
            steps = [(panel.begin, level)]
        elif time < panel.end:
            steps.append((time, level))
    return steps


def _area(steps: Sequence[tuple[float, int]], panel: Panel, base: float, scale: float, hue: str) -> str:
    path = [f"M{panel.x(panel.begin):.1f} {base:.1f}"]
    for time, level in steps:
        path.append(f"H{panel.x(time):.1f}V{base - level * scale:.1f}")
    path.append(f"H{panel.x(panel.end):.1f}V{base:.1f}Z")
    return f'<path d="{"".join(path)}" fill="{hue}"/>\n'


def _legend(names: set[str]) -> Iterator[str]:
    """One entry a colour, with all the names that have it."""
    entries: dict[str, list[str]] = {}
    for name in sorted(
        names, key=lambda name: list(COLOURS).index(name) if name in COLOURS else len(COLOURS)
    ):
        shown = "SAMPLE" if name.startswith("SAMPLE") else name.replace("ATTENTION_MERGE", "MERGE")
        if shown not in entries.setdefault(colour(name), []):
            entries[colour(name)].append(shown)
    x = 20.0
    for hue, shown_names in [*entries.items(), (_IDLE, ["waiting"])]:
        label = ", ".join(shown_names)
        yield bar(x, 74, 12, 12, hue)
        yield text(x + 17, 84, label, size=11)
        x += 17 + 6.9 * len(label) + 18


def _heading(panel: Panel, words: str, note: str) -> str:
    return text(20, panel.top - 16, words, size=14, weight="bold") + text(
        panel.left + panel.width, panel.top - 16, note, anchor="end", fill=FAINT, size=11.5
    )


def _marker(panel: Panel, begin: float, end: float) -> str:
    """A frame around what the next panel shows at close range."""
    x = panel.x(begin)
    return (
        f'<rect x="{x:.1f}" y="{panel.top - 4:.1f}" width="{panel.x(end) - x:.1f}" '
        f'height="{panel.bottom - panel.top + 8:.1f}" fill="none" stroke="{TEXT}" stroke-width="1.2"/>\n'
    )
