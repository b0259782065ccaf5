"""A decode step as data: instruction set, pages, planner, checker, and the oracle that runs it on a CPU."""
