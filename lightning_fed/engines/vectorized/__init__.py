"""The vectorized engine: several clients at once, through ``torch.func`` and traces."""
