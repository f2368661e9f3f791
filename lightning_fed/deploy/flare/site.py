"""The site's half: a loop of the Client API that passes FLARE's tasks to the site's resident process."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy.flare.arrays import packed, unpacked
from lightning_fed.deploy.site_process import Maker, SiteProcess, names_of


def serve_site(
    make_trainer: Maker,
    make_model: Maker,
    make_data: Maker,
    sites: Mapping[str, Sequence[int | str]] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    max_epsilon: float | None = None,
    delta: float | None = None,
    share_words: Sequence[str] = (),
) -> None:
    """Answer the tasks of a job until it ends. The client script of the job calls it.

    The functions are called in a process that persists across tasks, and is restarted if it ends. So FLARE may run the
    script inside its own process or outside.

    Args:
        make_trainer: Makes the server's trainer: ``"module:function"`` or a function, like the others.
        make_model: Makes the server's module.
        make_data: Takes a mapping with ``site``, the site's name in FLARE, and ``client-id``, its clients. Makes a
            :class:`lightning_fed.FederatedDataModule` with these clients.
        sites: The clients of each site, as on the server. By default, each site has the client of its name.
        state_dir: The folder of client states, with a folder for each site. By default ``~/.lightning_fed/sites``.
        max_epsilon: As for :class:`lightning_fed.deploy.FederatedSite`; so are ``delta`` and ``share_words``.
        delta: The delta of ``max_epsilon``.
        share_words: The columns whose words may leave the site.

    Raises:
        FederatedError: If another process cannot find one of the functions by name, or ``sites`` leaves this one out.

    Example::

        serve_site(
            "hospital.task:make_trainer",
            "hospital.task:make_model",
            "hospital.task:make_data",
        )
    """
    makers = names_of(make_trainer, make_model, make_data)
    flare.init()
    name = flare.get_site_name()
    if sites is not None and name not in sites:
        raise FederatedError(f"sites names {', '.join(sites)}, and this site is {name}. Add it, as the server has it.")
    config: dict[str, Any] = {"site": name}
    config["client-id"] = ",".join(map(str, sites[name] if sites is not None else [name]))
    limits = {"max-epsilon": max_epsilon, "privacy-delta": delta, "share-words": ",".join(share_words) or None}
    config |= {key: value for key, value in limits.items() if value is not None}
    if state_dir is not None:
        config["state-dir"] = str(Path(state_dir) / name)
    process = SiteProcess(makers, config, os.getpid())
    while flare.is_running():
        if (task := flare.receive()) is not None:
            answers = process.answer(unpacked(task.params or {}))
            flare.send(FLModel(params_type=ParamsType.FULL, params=packed(answers)))
