"""What ``self.log`` collects where several processes train the same client, each on its part of every batch."""

from collections.abc import Mapping, Sequence

import torch

from lightning_fed.engines.logged import Logged, RoundResults, _ClientMean, _flags_of

__all__ = ["SplitResults"]


class SplitResults(RoundResults):
    """A round's results whose means over a client are those of all processes, weighted by examples.

    Args:
        device: The device of the module.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._split_device = device

    def outline_client(self) -> dict[str, Logged]:
        """Return the sums that this process has of the client at work, for other processes."""
        return {
            key: Logged(_flags_of(self[key].meta), float(mean.total), mean.weight, mean.total.dtype)
            for key, mean in self._means.items()
            if mean.weight
        }

    def merge_client(self, outlines: Sequence[Mapping[str, Logged]]) -> None:
        """Put the client's sums together from those of all processes.

        Args:
            outlines: Everybody's :meth:`outline_client`.
        """
        for key in dict.fromkeys(key for outline in outlines for key in outline):
            parts = [outline[key] for outline in outlines if key in outline]
            if key not in self._means:  # this process had no example to log it for
                self._register(key, parts[0])
            mean = self._means[key]
            mean.total = torch.full_like(mean.total, sum(part.value for part in parts))
            mean.weight = sum(part.weight for part in parts)

    def _register(self, key: str, logged: Logged) -> None:
        self._registering = True
        super(RoundResults, self).log(value=torch.zeros((), device=self._split_device), batch_size=1, **logged.flags)
        self._registering = False
        self._means[key] = _ClientMean(self._split_device, ())

    def _client_size(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        return 1 if size is None else size
