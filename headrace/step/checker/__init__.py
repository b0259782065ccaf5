"""Proves a plan before it runs: `check` finds every fault that the modules here look for.

fields     descriptors are well formed
targets    every wait asks for what a step really adds to its counter
coverage   every output is made exactly once, by an SM that may
pages      loader and consumers mean the same pages, and these are the weights that the task is about
settings   windows, rotary pairs, norms and routing are those of the config
budget     ring, orders, shared memory and registers suffice
order      every wait is met; nothing is read before it is written, or overwritten while it may be read
"""

from __future__ import annotations

from headrace.step.checker.budget import check_budget
from headrace.step.checker.coverage import check_coverage
from headrace.step.checker.faults import Check, Fault
from headrace.step.checker.fields import check_fields
from headrace.step.checker.order import check_order
from headrace.step.checker.pages import check_pages
from headrace.step.checker.settings import check_settings
from headrace.step.checker.table import Table
from headrace.step.checker.targets import check_targets
from headrace.step.errors import PlanError
from headrace.step.plan import Plan

__all__ = ["Check", "Fault", "check", "require_sound"]

STEPS = 3  # of one launch that are looked at together: the first, and two that follow one


def check(plan: Plan, *, steps: int = STEPS) -> list[Fault]:
    """Every fault of a plan; none for a sound one."""
    table = Table(plan)
    if faults := check_fields(table):
        return faults  # what follows would trip over them
    looks = (check_targets, check_coverage, check_pages, check_settings, check_budget)
    return [*(fault for look in looks for fault in look(table)), *check_order(plan, steps)]


def require_sound(plan: Plan) -> None:
    """Raise PlanError, naming the faults, unless the plan has none."""
    if faults := check(plan):
        shown = "; ".join(str(fault) for fault in faults[:5])
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise PlanError(f"the plan must not run: {shown}{more}")
