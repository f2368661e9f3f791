"""Client states, and their stores in memory and on disk."""
