"""What the machine has and allows: GPUs, processes, permissions, open files, the interpreter."""
