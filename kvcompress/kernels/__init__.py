"""Tensor operations of the scoring core and the attention wrapper, one file each.

Every file starts with a torch reference that reads like the equation it implements: specification, and path of the CPU.
Its Triton kernel follows, and a function of the same signature that chooses between them (:mod:`.backend`). What every
kernel has to pass lies in :mod:`.checks`.
"""
