"""The trainer's arguments, and every check before the first round."""
