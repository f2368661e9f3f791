"""The states of a site's clients on the site's own disk."""

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedSite
from lightning_fed.deploy.site_states import SiteStates
from tests.deploy.site_models import model
from tests.deploy.wire import Wire, make_data, make_trainer

MAKE = partial(make_trainer, "Scaffold ii")


def test_two_processes_cannot_share_a_site_folder(tmp_path: Path) -> None:
    with (
        FederatedSite(MAKE(), model(), make_data([2]), 2, tmp_path),
        pytest.raises(FederatedError, match="Another site, here or in another process, works with the folder"),
    ):
        FederatedSite(MAKE(), model(), make_data([2]), 2, tmp_path)


@pytest.mark.thorough
def test_site_keeps_only_the_last_two_versions_of_a_state(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "Scaffold ii", clients_per_round=1.0))
    wire.run()
    assert sorted(path.name[:3] for path in (tmp_path / "2").rglob("*.state")) == ["2.4", "2.5"]
    assert not list((tmp_path / "2").rglob(".*.new"))


def of(version: int) -> tuple[int, str]:
    return version, "a"


@pytest.fixture
def states(tmp_path: Path) -> Iterator[SiteStates]:
    found = SiteStates(tmp_path / "site")
    yield found
    found.close()


def test_state_is_read_in_the_requested_version(states: SiteStates) -> None:
    for words in ({}, {"ward": ["eye"]}):
        agreed = {"clients": [3], "words": words, "facts": {"seed": "0"}}
        states.agree("r", agreed)
        assert states.agreed("r") == agreed
    (states.folder / "r" / "agreed.json").write_text('{"clients": [3]}')  # written by an earlier version
    assert states.agreed("r") == {"clients": [3], "words": {}, "facts": {}}
    assert states.read("r", 3, 0, of(0)) is None
    for version in (1, 2, 3):
        states.write("r", 0, of(version - 1), of(version), {"c": torch.full((2,), float(version))})
    for version in (2, 3):
        found = states.read("r", 3, 0, of(version))
        assert found is not None
        assert found["c"].tolist() == [version, version]
    with pytest.raises(
        FederatedError,
        match="Client 3 is asked to continue from its state after 1 rounds, of fit a, .* 2 of fit a, 3 of fit a",
    ):
        states.read("r", 3, 0, of(1))


def test_late_duplicate_of_an_old_task_keeps_newer_states(states: SiteStates) -> None:
    states.agree("r", {"clients": [3], "words": {}})
    for before, version in ((0, 1), (1, 4), (4, 6)):
        states.write("r", 0, of(before), of(version), {"c": torch.full((2,), float(version))})
    states.write("r", 0, of(0), of(1), {"c": torch.ones(2)})  # a repeat of its first round
    for version in (4, 6):
        assert states.read("r", 3, 0, of(version)) is not None
    for version in (3, 2, 1):  # a server may send anything
        states.write("r", 0, of(0), of(version), {"c": torch.ones(2)})
    assert len(list((states.folder / "r").glob("*.state"))) == 3


def test_second_copy_of_a_task_of_an_abandoned_server_keeps_the_states_of_the_last_one(states: SiteStates) -> None:
    states.agree("r", {"clients": [3], "words": {}})
    states.write("r", 0, (0, "0"), (1, "d"), {"c": torch.zeros(2)})
    for fit in "cba":  # three servers in turn, of which the first two ended in the middle of the round
        states.write("r", 0, (1, "d"), (2, fit), {"c": torch.ones(2)})
        os.utime(states.folder / "r" / f"0.2.{fit}.state", ns=(0, ord("d") - ord(fit)))
    states.write("r", 0, (1, "d"), (2, "c"), {"c": torch.zeros(2)})
    assert states.read("r", 3, 0, (2, "a")) is not None
    assert states.read("r", 3, 0, (1, "d")) is not None


def test_slower_of_two_servers_of_a_run_is_rejected(states: SiteStates) -> None:
    ahead, behind = 8 * "a", 8 * "b"
    states.agree("r", {"clients": [3], "words": {}})
    states.write("r", 0, (0, 8 * "0"), (1, behind), {"c": torch.zeros(2)})
    for number in range(3):
        states.write("r", 0, (number, ahead), (number + 1, ahead), {"c": torch.ones(2)})
    with pytest.raises(FederatedError, match=f"after 1 rounds, of fit {behind}, and .* has versions 2 of fit {ahead}"):
        states.read("r", 3, 0, (1, behind))


def test_failed_state_write_is_named_and_keeps_the_previous_state(
    states: SiteStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.agree("r", {"clients": [3], "words": {}})
    states.write("r", 0, of(0), of(1), {"c": torch.ones(2)})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FederatedError, match=r"0\.2\.a\.state cannot be written: No space left .* Earlier states"):
        states.write("r", 0, of(1), of(2), {"c": torch.zeros(2)})
    found = states.read("r", 3, 0, of(1))
    assert found is not None
    assert found["c"].tolist() == [1, 1]
    with pytest.raises(FederatedError, match="has versions 1 of fit a"):
        states.read("r", 3, 0, of(2))
    assert not list(states.folder.rglob(".*.new"))


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are those of POSIX")
def test_folder_writable_by_others_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode, told in ((0o755, 0), (0o777, 1)):
        tmp_path.chmod(mode)
        SiteStates(tmp_path).close()
        assert caplog.text.count("Others can write into the site's folder") == told


def test_corrupt_file_is_named(states: SiteStates) -> None:
    assert states.agreed("r") is None
    states.agree("r", [3])
    states.write("r", 0, of(0), of(1), {"c": torch.ones(2)})
    (states.folder / "r" / "0.1.a.state").write_bytes(b"half")
    with pytest.raises(FederatedError, match="0.1.a.state is damaged"):
        states.read("r", 3, 0, of(1))
    (states.folder / "r" / "agreed.json").write_text("{")
    with pytest.raises(FederatedError, match="agreed.json is damaged.*start a new run"):
        states.agreed("r")


def test_partial_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    half = tmp_path / "r" / ".0.1.a.state.new"
    half.parent.mkdir()
    half.write_bytes(b"half")
    SiteStates(tmp_path).close()
    assert not half.exists()


def test_clients_of_a_run_cannot_change(tmp_path: Path) -> None:
    states = SiteStates(tmp_path)
    run, first = "0123456789abcdef", {"clients": ["a", "b"], "words": {}, "facts": {}}
    states.agree(run, first)
    states.agree(run, first)
    for clients in (["b", "a"], ["a", "b", "c"]):
        with pytest.raises(FederatedError, match="registers run 0123456789abcdef with other clients than before"):
            states.agree(run, {**first, "clients": clients})
    states.agree("0123456789abcdee", {**first, "clients": ["b", "a"]})
    later = {**first, "words": {"ward": ["eye"]}}  # the server restarted before its first checkpoint
    states.agree(run, later)
    assert states.agreed(run) == later
    states.close()
