"""Whether the kernel is right on this machine: it is compared with the oracle, with itself, and with PyTorch.

The tests for a GPU and `headrace check` hold it to the same bounds, which are here.
"""
