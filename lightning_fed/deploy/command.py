"""``lightning-fed deploy``: the app of a configuration, and a run of it on this machine."""

import importlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_fed.core.arguments import check_count
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy.configured import Configured, share_clients

_TRIED = 5  # rounds of a run on this machine, unless told otherwise
_TRANSPORTS = {"flower": ("flower", "flwr", "Flower"), "nvflare": ("flare", "nvflare", "NVFlare")}
"""By name, which is the extra's as well: the room, the package that it needs, and how people call that."""


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = ArgumentParser(
        prog="lightning-fed deploy",
        description="Write a configuration's app for Flower or NVFlare, and run it on this machine, with a process for"
        " each site.",
        allow_abbrev=False,
    )
    parser.add_argument("transport", choices=list(_TRANSPORTS), help="What carries the messages.")
    parser.add_argument("--config", "-c", type=str, required=True, help="A configuration of `lightning-fed fit`.")
    parser.add_argument("--sites", type=int, default=3, help="The number of sites; each has a share of the clients.")
    parser.add_argument(
        "--out", type=str, default="federated_app", help="A new folder, for the app and all that the run writes."
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"The largest number of rounds; {_TRIED} by default, with --run false that of the configuration.",
    )
    parser.add_argument("--run", type=bool, default=True, help="false only writes the app.")
    return parser


def deploy(args: list[str] | None = None) -> None:
    """Write the app of a configuration, start its transport on this machine, and run it."""
    said = make_parser().parse_args(args)
    who, (room, package, called) = f"deploy {said.transport}", _TRANSPORTS[said.transport]
    if find_spec(package) is None:
        raise FederatedError(f'{who}: {called} is missing: pip install "lightning_fed[{said.transport}]".')
    out = Path(said.out).absolute()
    rounds = said.rounds if said.rounds is not None or not said.run else _TRIED
    if rounds is not None:
        check_count(who, "--rounds", rounds, least=1)
    config, sites = Path(said.config), check_count(who, "--sites", said.sites, least=1)
    shares = share_clients(who, Configured(config).client_ids(), sites)
    trial: Any = importlib.import_module(f"lightning_fed.deploy.{room}.configured")
    print(trial.write(who, config, out, shares, rounds))
    if said.run:
        with _ended_by_signals():
            trial.run(who, out, shares)
        print(f"The run is complete: {out / 'last.ckpt'}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the first signal that asks this process to end leave the context, and ignore the next ones meanwhile."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

    def end(number: int, frame: Any) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
