"""The vectorized engine: several clients at once, with ``torch.func`` and traces."""
