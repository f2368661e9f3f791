"""A configuration's app for Flower: ``lightning-fed deploy`` writes it, and it makes trainer, model and data."""

import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lightning_fed.cli.configuration import CellParts
from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count
from lightning_fed.core.errors import FederatedError, refusal_in
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.flower.local import LocalFlower

__all__ = ["Configured", "deploy", "make_parser", "write_app"]

_TEMPLATES = Path(__file__).parent / "app"
_NAME = "federated_app"
_TRIED = 5  # rounds of a run on this machine, unless told otherwise
_NOT_SENT = "/flower/\n/logs/\n/sites/\n/lightning_logs/\n*.ckpt*\n"  # to sites: what a run writes beside the app


class Configured:
    """What a configuration describes, made again at every call.

    Server and sites make all of it: each site uses the data of its own clients, the server the validation set alone.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def _parts(self) -> CellParts:
        try:
            quiet = {"enable_progress_bar": False, "enable_model_summary": False}
            return CellParts(yaml.safe_load(self._file.read_text(encoding="utf-8")), outputs=quiet)
        except Exception as error:
            raise FederatedError(f"{self._file}: {refusal_in(error) or error}") from error

    def trainer(self) -> pl.Trainer:
        """Return the trainer, without a progress bar."""
        trainer: pl.Trainer = self._parts().trainer
        return trainer

    def model(self) -> pl.LightningModule:
        """Return the model, which ``seed_everything`` makes the same everywhere."""
        model: pl.LightningModule = self._parts().model
        return model

    def data(self, node_config: Mapping[str, Any] | None = None) -> Any:
        """Return the data module."""
        return self._parts().datamodule

    def client_ids(self) -> list[int | str]:
        """Return the ids of all clients."""
        return list(self._data_set_up().client_ids)

    def val(self) -> Any:
        """Return the validation set of the server, None if there is none."""
        return self._data_set_up().val

    def _data_set_up(self) -> Any:
        data = self.data()
        data.prepare_data()
        data.setup("fit")
        return data


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = ArgumentParser(
        prog="lightning-fed deploy",
        description="Write a configuration's app for Flower, and run it with SuperLink and SuperNodes on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("transport", choices=["flower"], help="What carries the messages.")
    parser.add_argument("--config", "-c", type=str, required=True, help="A configuration of `lightning-fed fit`.")
    parser.add_argument(
        "--sites", type=int, default=3, help="The number of SuperNodes; each has a share of the clients."
    )
    parser.add_argument("--out", type=str, default=_NAME, help="A new folder, for the app and all that the run writes.")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"The largest number of rounds; {_TRIED} by default, with --run false that of the configuration.",
    )
    parser.add_argument("--run", type=bool, default=True, help="Whether to run the app, or to write it alone.")
    return parser


def deploy(args: list[str] | None = None) -> None:
    """Write the app of a configuration, start Flower on this machine, and run it, as ``lightning-fed deploy`` does."""
    said = make_parser().parse_args(args)
    if find_spec("flwr") is None:
        raise FederatedError('deploy flower: Flower is missing: pip install "lightning_fed[flower]".')
    out = Path(said.out).absolute()
    rounds = said.rounds if said.rounds is not None or not said.run else _TRIED
    if rounds is not None:
        check_count("deploy flower", "--rounds", rounds, least=1)
    clients = write_app(Path(said.config), out, rounds)
    shares = share_clients(clients, check_count("deploy flower", "--sites", said.sites, least=1))
    nodes = [
        f'client-id="{",".join(map(str, share))}" state-dir="{out / "sites" / str(number)}"'
        for number, share in enumerate(shares)
    ]
    print(f"Made {out}: the app, which `flwr run {out}` starts where a SuperLink is.")
    if not said.run:
        return
    print(f"SuperLink and {len(nodes)} SuperNodes start on this machine; their logs are in {out / 'logs'}.", flush=True)
    with _ended_by_signals(), LocalFlower(out, nodes) as flower:
        run = flower.submit(out)
        flower.follow(run)
        status = flower.status(run)
    if status != "finished:completed":
        raise FederatedError(f"deploy flower: the run is {status}. Its log is above, those of Flower in {flower.logs}.")
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


def write_app(config: Path, out: Path, rounds: int | None = None) -> list[ClientId]:
    """Write an app for Flower from a configuration, with so many rounds at most; return the ids of its clients."""
    clients = Configured(config).client_ids()
    if wrong := [client for client in clients if {*str(client)} & {",", '"'}]:
        raise FederatedError(f"deploy flower: the id of client {wrong[0]!r} has a comma or a quotation mark.")
    package = out / _NAME
    try:
        package.mkdir(parents=True)
        for template in sorted(_TEMPLATES.glob("*.in")):
            folder = out if template.name.startswith("pyproject") else package
            text = Template(template.read_text(encoding="utf-8")).substitute(name=_NAME)
            (folder / template.name.removesuffix(".in")).write_text(text, encoding="utf-8")
        (package / "__init__.py").touch()
        (out / ".gitignore").write_text(_NOT_SENT, encoding="utf-8")
        kept = yaml.safe_load(config.read_text(encoding="utf-8"))
        if rounds is not None:
            trainer = kept.setdefault("trainer", {})
            name = "max_epochs" if trainer.get("max_rounds") is None and "max_epochs" in trainer else "max_rounds"
            given = trainer.get(name)
            trainer[name] = rounds if given is None or given == -1 else min(rounds, given)
        (package / "config.yaml").write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    except FileExistsError as error:
        raise FederatedError(f"deploy flower: {out} has an app already. Give another folder by --out.") from error
    except OSError as error:
        shutil.rmtree(package, ignore_errors=True)
        raise FederatedError(f"deploy flower: {out} cannot be written: {error.strerror}.") from error
    return clients


def share_clients(clients: list[ClientId], sites: int) -> list[list[ClientId]]:
    """Return the clients of each site, which differ in number by one at most."""
    if sites > len(clients):
        raise FederatedError(f"deploy flower: --sites {sites} is more than the {len(clients)} clients there are.")
    return [clients[number::sites] for number in range(sites)]
