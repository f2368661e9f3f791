"""The FLARE calls of the transport, answered by sites of this process without NVFlare."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedSite, Message, RemoteClients
from lightning_fed.deploy.flare.arrays import packed, unpacked
from lightning_fed.deploy.flare.transport import FlareTransport
from lightning_fed.deploy.site_process import refusal
from tests.deploy.site_models import model
from tests.deploy.wire import make_data, make_trainer, parameters, simulated

Arrays = dict[str, Any]
METHOD = "Scaffold ii"
SITES = {"site-1": [0], "site-2": [1], "site-3": [3, 2]}


class Flare:
    """Sites that answer at once.

    Attributes:
        spoils: Takes a site and its result, and returns the result to deliver. None loses it.
        asked: The site, phases and clients of each request.
        given_back: Cancelled tasks.
        silent_for: Takes a site, and returns the seconds since FLARE last heard from it.
    """

    def __init__(self, folder: Path, sites: Mapping[str, Sequence[int]] = SITES) -> None:
        self.folder, self.sites = folder, sites
        self.open: dict[str, FederatedSite] = {}
        self.spoils: Callable[[str, Arrays], Arrays | str | None] = lambda site, result: result
        self.asked: list[tuple[str, str, list[Any]]] = []
        self.given_back: list[Any] = []
        self.is_aborted = False
        self.silent_for: Callable[[str], float] = lambda site: 0.0

    def site(self, name: str) -> FederatedSite:
        if name not in self.open:
            ids = self.sites[name]
            data, folder = make_data(ids), self.folder / name
            self.open[name] = FederatedSite(make_trainer(METHOD), model(), data, list(ids), folder)
        return self.open[name]

    def send(self, name: str, arrays: Arrays, done: Callable[[Arrays | str], None]) -> Any:
        messages = {key: Message.from_bytes(content) for key, content in unpacked(arrays).items()}
        phases = {str(message.header["phase"]) for message in messages.values()}
        self.asked.append((name, "+".join(sorted(phases)), [message.client for message in messages.values()]))
        answers = {}
        for key, message in messages.items():
            try:
                answers[key] = self.site(name).answer(message).to_bytes()
            except FederatedError as error:
                answers[key] = refusal(str(error))
        if (found := self.spoils(name, packed(answers))) is not None:
            done(found)
        return len(self.asked)

    def transport(self, timeout: float = 60.0) -> FlareTransport:
        return FlareTransport(
            self.send,
            self.given_back.append,
            self.sites,
            timeout,
            lambda: self.is_aborted,
            lambda site: self.silent_for(site),
        )

    def run(self, timeout: float = 60.0, ckpt_path: Path | None = None, **options: Any) -> Any:
        trainer, module = make_trainer(METHOD, **options), model()
        trainer.fit(module, RemoteClients(self.transport(timeout), range(4)), ckpt_path=ckpt_path)
        return module

    def end(self) -> None:
        for site in self.open.values():
            site.close()
        self.open = {}


def expected(**options: Any) -> torch.Tensor:
    return parameters(simulated(partial(make_trainer, METHOD, **options)).lightning_module)
