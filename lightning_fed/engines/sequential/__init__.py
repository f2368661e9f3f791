"""The sequential engine: one client after another, through Lightning's own loop."""
