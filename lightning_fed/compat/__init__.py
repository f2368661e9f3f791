"""Which Lightning is in use, its private names, and torchvision beside a CPU build of PyTorch."""
