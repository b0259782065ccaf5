"""Writes headrace/kernel/include/isa.h from the instruction set."""

from __future__ import annotations

from pathlib import Path

from headrace.step.isa_header import isa_header

HEADER = Path(__file__).parent.parent / "headrace" / "kernel" / "include" / "isa.h"


def main() -> None:
    HEADER.parent.mkdir(parents=True, exist_ok=True)
    HEADER.write_text(isa_header(), encoding="utf-8")
    print(f"wrote {HEADER}")


if __name__ == "__main__":
    main()
