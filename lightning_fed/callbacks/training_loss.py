"""The loss that a run minimises."""

from lightning_fed.callbacks.measure import WeightedMeasure, Weighting
from lightning_fed.compat.package import pl
from lightning_fed.core.rounds import RoundReport

__all__ = ["TrainingLoss"]


class TrainingLoss(WeightedMeasure):
    r"""Measure the clients' training loss at the new server model.

    It logs ``population/train_loss``, :math:`f(x) = \sum_i w_i f_i(x)`, where :math:`f_i` is the mean over all training
    examples of a client of what ``training_step`` returns, in eval mode and without augmentation. With weights by
    examples it is the loss that the figures of Li et al., *Federated Optimization in Heterogeneous Networks* (FedProx),
    MLSys 2020 (https://arxiv.org/abs/1812.06127), draw. ``train_loss``, if the module logs it, is another: that of the
    cohort's batches while they are trained on.

    It costs a forward pass over the data of each client.

    Args:
        every_n_rounds: Measure after every so many rounds.
        clients: How many clients to measure, a fixed sample; :math:`f` is their mean. All by default.
        weighting: "examples", :math:`w_i \propto n_i`, or "uniform".

    Raises:
        FederatedError: If an argument is not allowed, or more clients are wanted than there are.
    """

    def __init__(self, every_n_rounds: int = 1, clients: int | None = None, weighting: Weighting = "examples") -> None:
        super().__init__(every_n_rounds, clients, weighting)

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Measure and log."""
        loop = trainer.fit_loop
        if not self.is_due(loop.round):
            return
        losses = loop.training_losses(self.measured)
        weights = {i: self.weight(trainer, i) for i in losses}
        if weights:  # else no site has answered
            total = sum(weights[i] * losses[i] for i in losses)
            loop.log_round({"population/train_loss": total / sum(weights.values())})
