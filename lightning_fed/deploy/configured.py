"""``lightning-fed deploy``: the app that creates a configuration's trainer, model and data, and its local run."""

import importlib
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import yaml
from filelock import FileLock, Timeout
from jsonargparse import ArgumentParser

from lightning_fed.cli.configuration import CellParts
from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count
from lightning_fed.core.errors import FederatedError, refusal_in
from lightning_fed.core.types import ClientId

NAME = "federated_app"
"""The package in an app, with the configuration and the functions that server and sites call."""

_TASK = Path(__file__).with_name("task.py.in")


class Configured:
    """The objects of a configuration, created again at every call.

    Server and sites create all of them. Each site uses only its clients' data, the server only the validation set.
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
        """Return the model; with ``seed_everything``, it is the same everywhere."""
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


def write_app(
    who: str, config: Path, templates: Path, out: Path, package: Path, rounds: int | None, values: Mapping[str, str]
) -> str:
    """Write the files of a folder of templates into ``out``, and a package with the configuration.

    Files that are there already stay. Errors name ``who``. ``package`` is the package's folder,
    ``rounds`` the largest number of rounds, and ``values`` replace names in the templates; "config" is the name of the
    file with the configuration.

    Returns:
        "Made" or "Found", for a message.

    Raises:
        FederatedError: If one of the files is there with other content, or ``out`` cannot be written.
    """
    values = {"config": "config.yaml", **values}
    kept = yaml.safe_load(config.read_text(encoding="utf-8"))
    if rounds is not None:
        trainer = kept.setdefault("trainer", {})
        name = "max_epochs" if trainer.get("max_rounds") is None and "max_epochs" in trainer else "max_rounds"
        given = trainer.get(name)
        trainer[name] = rounds if given is None or given == -1 else min(rounds, given)
    texts = {package / "__init__.py": "", package / values["config"]: yaml.safe_dump(kept, sort_keys=False)}
    sources = {out / file.relative_to(templates): file for file in templates.rglob("*.in")}
    for path, source in {**sources, package / _TASK.name: _TASK}.items():
        text = Template(source.read_text(encoding="utf-8")).substitute(values)
        texts[path.with_name(path.name.removesuffix(".in"))] = text
    try:
        missing = [path for path in texts if not path.exists()]
        for path in texts:
            if path not in missing and path.read_text(encoding="utf-8", errors="replace") != texts[path]:
                raise FederatedError(
                    f"{who}: {out} has another app or project already: its {path.relative_to(out)} is not what these"
                    " arguments give. To continue a run, give the arguments that its app was made with. To start"
                    " another one, give another folder by --out."
                )
        for path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
    except OSError as error:
        raise FederatedError(f"{who}: {out} cannot be written: {error.strerror}.") from error
    return "Made" if missing else "Found"


def share_clients(who: str, clients: list[ClientId], sites: int) -> list[list[ClientId]]:
    """Return the clients of each site; their numbers differ by at most one."""
    if wrong := [client for client in clients if {*str(client)} & {",", '"'}]:
        raise FederatedError(f"{who}: the id of client {wrong[0]!r} has a comma or a quotation mark.")
    if sites > len(clients):
        raise FederatedError(f"{who}: --sites {sites} is more than the {len(clients)} clients there are.")
    return [clients[number::sites] for number in range(sites)]


_TRIED = 5  # default rounds of a run on this machine
_TRANSPORTS = {"flower": ("flower", "flwr", "Flower"), "nvflare": ("flare", "nvflare", "NVFlare")}
"""By name, which is also the extra's: the subpackage, the package that it needs, and its display name."""


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
        "--out",
        type=str,
        default="federated_app",
        help="A folder for the app and all that the run writes. The same command continues a run that has ended there.",
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
        try:
            held = FileLock(out / "run.lock", timeout=0).acquire()
        except Timeout as error:
            raise FederatedError(f"{who}: another run is at work in {out}. End it, or give another --out.") from error
        with held, _ended_by_signals():
            trial.run(who, out, shares)
        print(f"The run is complete: {out / 'last.ckpt'}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Leave the context at the first signal that ends this process, and ignore further ones meanwhile."""
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
