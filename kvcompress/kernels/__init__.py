"""Tensor operations of the scoring core and the attention wrapper, one file each.

Every file starts with a torch reference that reads like the equation it implements. The reference is the
specification and the CPU path; accelerator kernels live beside it under the same signature.
"""
