"""LM_HEAD: the logits of an SM's own part of the vocabulary."""

from __future__ import annotations

import numpy as np

from headrace.step.oracle.arithmetic import dot
from headrace.step.oracle.core import PrivateTiles, Task


def lm_head(task: Task) -> None:
    rows = list(task.states())
    logits = dot(task.normalized(rows), task.weight_rows()) * np.float32(task.sizes.logit_scale)
    task.core.logits = PrivateTiles(task.tiles.start, task.tiled(rows, logits))
