"""Numbers that count their comparisons and hashes."""


class Counted(int):
    """A number whose comparisons and hashes are counted."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        """Compare like a number."""
        Counted.looks += 1
        return int(self) == other

    def __hash__(self) -> int:
        """Return the number's hash."""
        Counted.looks += 1
        return int.__hash__(self)
