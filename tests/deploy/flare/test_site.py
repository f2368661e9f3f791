"""The loop of the Client API on a site."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason='no NVFlare: pip install "lightning_fed[nvflare]"')

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy.flare import site
from lightning_fed.deploy.flare.arrays import packed, unpacked
from tests.deploy.task import DATA, NAMES


def test_tasks_reach_the_site_process_with_clients_and_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, sent, made = [packed({"0": b"a", "1": b"b"}), None, packed({"0": b"c"})], [], []

    class Process:
        def __init__(self, makers: Any, config: Any, parent: int) -> None:
            made.append(config)

        def answer(self, tasks: dict[str, bytes]) -> dict[str, bytes]:
            return {key: task.upper() for key, task in tasks.items()}

    def received() -> Any:
        arrays = tasks.pop(0)
        return arrays and SimpleNamespace(params=arrays)

    api = SimpleNamespace(
        init=lambda: None,
        get_site_name=lambda: "site-2",
        is_running=lambda: bool(tasks),
        receive=received,
        send=lambda model: sent.append(unpacked(model.params)),
    )
    monkeypatch.setattr(site, "flare", api)
    monkeypatch.setattr(site, "SiteProcess", Process)
    site.serve_site(*NAMES, DATA, {"site-2": [3, "north"]}, "/data/states")
    assert sent == [{"0": b"A", "1": b"B"}, {"0": b"C"}]
    assert made == [{"site": "site-2", "client-id": "3,north", "state-dir": "/data/states/site-2"}]
    tasks.append(None)
    site.serve_site(*NAMES, DATA)
    assert made[1] == {"site": "site-2", "client-id": "site-2"}
    tasks.append(None)
    site.serve_site(*NAMES, DATA, max_epsilon=8.0, delta=1e-6, share_words=["ward", "sex"])
    assert made[2] == {
        "site": "site-2",
        "client-id": "site-2",
        "max-epsilon": 8.0,
        "privacy-delta": 1e-6,
        "share-words": "ward,sex",
    }
    with pytest.raises(FederatedError, match=r"sites names site-1, site-3, and this site is site-2\. Add it"):
        site.serve_site(*NAMES, DATA, {"site-1": [0], "site-3": [1]})
    with pytest.raises(FederatedError, match="make_data"):
        site.serve_site(*NAMES, lambda config: None)
