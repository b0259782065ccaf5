"""An interpreter of plans on the CPU: the truth that the kernel is compared with, and a detector of races."""
