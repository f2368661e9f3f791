"""The command ``lightning-fed data``: show how a configuration splits its data, without training."""

from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.skew_report import skew_table, split_figure


def picture(args: list[str] | None = None) -> None:
    """Print how much the clients of a configuration differ, and draw the data of each.

    Any configuration of ``lightning-fed fit`` works, including saved ones. Only its data is instantiated.
    """
    parser = make_parser()
    options = parser.parse_args(args)
    if isinstance(options.seed_everything, int) and not isinstance(options.seed_everything, bool):
        pl.seed_everything(options.seed_everything, verbose=False)
    data = parser.instantiate_classes(options).data
    data.prepare_data()
    data.setup("fit")
    print(skew_table(data))
    figure = split_figure(data, options.max_clients)
    path = Path(options.out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise FederatedError(
            f"--out {path}: matplotlib cannot write this ({error}). Use a name such as split.png."
        ) from error
    except OSError as error:
        raise FederatedError(f"--out {path} cannot be written: {error.strerror}. Name another place.") from error
    print(f"{'picture':<21}{path}")


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = ArgumentParser(
        prog="lightning-fed data",
        description="Print how much the clients of a configuration differ, and plot the split.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", "-c", action="config", help="A configuration of `lightning-fed fit`. Give several to combine them."
    )
    parser.add_argument("--out", type=str, default="split.png", help="Where to write the picture.")
    parser.add_argument("--max_clients", type=int, default=50, help="How many clients to draw at most.")
    parser.add_argument("--seed_everything", type=bool | int, default=False, help="As for `lightning-fed fit`.")
    parser.add_subclass_arguments(FederatedDataModule, "data", required=True)
    for name in ("ckpt_path", "lr_scheduler", "model", "optimizer", "trainer", "weights_only"):
        parser.add_argument(f"--{name}", type=_Unread(), help=SUPPRESS)  # accepted in a configuration, but unused
    return parser


class _Unread:
    """The type of an unused part of a configuration; for Any, jsonargparse would import and create its classes."""

    def __call__(self, value: Any) -> Any:
        return value

    def __repr__(self) -> str:
        return "anything"
