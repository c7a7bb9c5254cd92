"""``make gpu``: check the kernels on a GPU, measure them and generation, and write a report."""
