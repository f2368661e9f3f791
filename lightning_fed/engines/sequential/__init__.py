"""The sequential engine: one client after another in Lightning's loop."""
