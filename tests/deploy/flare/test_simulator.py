"""Real processes of FLARE on this machine: its simulator, its clients, and the processes of the sites."""

from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason='no NVFlare: pip install "lightning_fed[nvflare]"')

from tests.deploy.flare.jobs import check_bits, rounds_in, running, site_processes, written_job
from tests.deploy.processes import is_alive, needs_linux, wait_for

pytestmark = [needs_linux, pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("method", "external"),
    [("FedAvg", False), ("Scaffold ii", True), ("Mime", False), ("FedCM", True), ("Ditto", False)],
)
def test_job_and_simulation_yield_identical_bits(method: str, external: bool, tmp_path: Path) -> None:
    written_job(tmp_path, external)
    with running(tmp_path, method) as process:
        wait_for(lambda: rounds_in(tmp_path / "last.ckpt") >= 1)
        sites = site_processes(tmp_path)
        assert process.wait() == 0
    assert len(sites) == 3
    wait_for(lambda: not any(map(is_alive, sites.values())))
    check_bits(tmp_path / "last.ckpt", method)
