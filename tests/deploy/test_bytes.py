"""What goes over the wire is what the documentation says."""

from functools import partial
from pathlib import Path

import pytest

from tests.deploy.wire import METHODS, SIZES, Wire, make_trainer

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
NAMES = {
    "ServerOnly, FedAvg, FedProx": ("ServerOnly", "FedAvg", "FedProx"),
    "FedProx with adaptive mu": ("FedProx adaptive",),
    "FedDANE": ("FedDane", "FedDane own"),
    "SCAFFOLD, option i": ("Scaffold i",),
    "SCAFFOLD, option ii, with plain SGD": ("Scaffold ii",),
    "FedSAM, FedSpeed": ("FedSAM", "FedSpeed"),
    "FedRep, Ditto, APFL, pFedMe": ("FedRep", "Ditto", "APFL", "pFedMe"),
    "FedProxVR": ("FedProxVR svrg", "FedProxVR sarah"),
    "FedCM, MoFedSAM with plain SGD": ("FedCM", "MoFedSAM"),
    "FedDyn": ("FedDyn",),
    "Mime with SGD": ("Mime",),
    "C-Mime with SGDm": ("C-Mime",),
    "MimeLite with Adam": ("MimeLite Adam",),
    "MimeMVR": ("MimeMVR",),
}


def rows() -> dict[str, list[str]]:
    lines = PAGE.read_text().split("| method | up | down |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: numbers for name, *numbers in cells}


def test_every_method_is_in_the_table() -> None:
    assert rows().keys() == NAMES.keys()
    assert {name for names in NAMES.values() for name in names} == set(METHODS)


@pytest.mark.parametrize("row", list(NAMES))
def test_the_vectors_on_the_wire_are_those_of_the_table(row: str, tmp_path: Path) -> None:
    up, down, _ = rows()[row]
    for method in NAMES[row]:
        wire = Wire(tmp_path / method, partial(make_trainer, method, clients_per_round=1.0, max_rounds=2))
        with wire.server() as server:
            wire.run(server, rounds=1)
            sent, received, report = 0, 0, None
            while report is None:
                tasks = server.tasks()
                received += sum(value.nbytes for task in tasks.values() for value in task.tensors.values())
                for reply in wire.exchange(tasks):
                    sent += sum(value.nbytes for value in reply.tensors.values())
                    server.receive(reply)
                report = server.close_phase()
        vector = 4 * server.trainer.fit_loop.state.x.numel() * len(SIZES)
        assert (sent // vector, received // vector) == (int(up), int(down)), method
        loss = 8 * len(SIZES) if method == "FedProx adaptive" else 0  # which is in the header
        assert sent + loss == report.bytes_up
        wire.kill()
