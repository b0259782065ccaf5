"""The few elements that our pictures are made of, as SVG text.

A picture brings its own white ground, so that it reads the same on a light page and on a dark one, and names
fonts that are there everywhere instead of holding one.
"""

from __future__ import annotations

from html import escape

GROUND = "#ffffff"
TEXT, FAINT, RULE = "#222222", "#666666", "#dddddd"  # for words, lesser words, and lines behind the data


def opening(width: float, height: float) -> str:
    """The first lines of a picture of so many pixels; `</svg>` ends it."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size} '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12">\n<rect {size} fill="{GROUND}"/>\n'
    )


def bar(
    x: float, y: float, width: float, height: float, hue: str, label: str = "", opacity: float = 1.0
) -> str:
    """A rectangle by its upper left corner; a label shows under the pointer."""
    faint = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:g}" fill="{hue}"{faint}'
    return f"<rect {shape}><title>{escape(label)}</title></rect>\n" if label else f"<rect {shape}/>\n"


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 12,
    weight: str = "normal",
    anchor: str = "start",
    fill: str = TEXT,
) -> str:
    """Words whose base line begins, or ends, or has its middle at a place; nothing for no words."""
    style = f'font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>\n' if words else ""
