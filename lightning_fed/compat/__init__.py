"""Lightning's package and private names, and torchvision with a CPU build of PyTorch."""
