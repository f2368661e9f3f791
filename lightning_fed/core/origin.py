"""What a run continues from, as its errors and warnings name it: a checkpoint, or the trainer's earlier fit."""

from dataclasses import dataclass

__all__ = ["CHECKPOINT", "EARLIER_FIT", "Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The words for what a run continues from.

    Attributes:
        name: What it is, at the start of a sentence.
        has: The verb for what it contains.
        ran: What follows the name before its settings.
        this: What continues from it.
        template: The remedy, with a place for what has to be the same.
    """

    name: str
    has: str
    ran: str
    this: str
    template: str

    def remedy(self, what: str) -> str:
        """Return what to do if something differs.

        Args:
            what: What has to be the same, such as "the settings".
        """
        return self.template.format(what=what)


CHECKPOINT = Origin(
    "The checkpoint",
    "holds",
    "was written with",
    "this run",
    "Resume with {what} it was written with, or start from its weights alone: Model.load_from_checkpoint(path), then"
    " fit without ckpt_path.",
)
EARLIER_FIT = Origin(
    "The earlier fit",
    "had",
    "ran with",
    "this fit",
    "Call fit() with {what} of the earlier fit to continue it, or make a new FederatedTrainer to start a new run.",
)
