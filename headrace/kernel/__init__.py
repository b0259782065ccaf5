"""The decode megakernel: CUDA headers, their compilation at run time, and launches."""
