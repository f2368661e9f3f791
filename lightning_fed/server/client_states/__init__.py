"""What clients keep between rounds: the state, and its stores in memory and on disk."""
