"""Times a start from packed weights that are kept on disk: how fast a GPU's memory fills.

The weights are synthetic, at the shape of North Mini Code, or of its first layers where the disk is small.
The file is read while the system still holds it in memory, and again once it has been asked to drop it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from headrace.model.synthetic import preset
from headrace.step import kept
from headrace.step.pack import PackedWeights, pack_synthetic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="north-mini-code")
    parser.add_argument("--layers", type=int, help="only the first so many")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be timed")
    parser.add_argument("--threads", type=int, nargs="*", default=[kept.THREADS])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU here: --device cpu times how a CPU's memory fills.")
    config = preset(options.shape)
    config = replace(config, layers=config.layers[: options.layers])
    begun = time.monotonic()
    weights = pack_synthetic(config, device=options.device, dtype=torch.bfloat16)
    say("making", weights, begun)
    right = weights.data[:: 1 << 16].clone()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder) / "x-y.pages"
        begun = time.monotonic()
        kept.write(place, weights)
        say("writing", weights, begun)
        for threads in options.threads:
            kept.THREADS = threads
            for what in ("reading from memory", "reading from disk"):
                if what == "reading from disk":
                    drop(place)
                del weights
                begun = time.monotonic()
                weights = kept.read(place, config, device=options.device, dtype=torch.bfloat16)
                say(f"{what} by {threads}", weights, begun)
                if not torch.equal(weights.data[:: 1 << 16].view(torch.int16), right.view(torch.int16)):
                    raise SystemExit("what was read is not what was written")


def drop(place: Path) -> None:
    """Have the system forget what it holds of a file in memory."""
    with place.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def say(what: str, weights: PackedWeights, begun: float) -> None:
    seconds, size = time.monotonic() - begun, weights.data.nbytes
    print(f"{what}: {size / 1e9:.1f} GB in {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s", flush=True)


if __name__ == "__main__":
    main()
