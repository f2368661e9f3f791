"""NVFlare's part of ``lightning-fed deploy``: the job of a configuration, and FLARE's simulator on this machine."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.configured import NAME, write_app

_PATIENCE = 20.0  # seconds to wait until FLARE's processes end


def write(who: str, config: Path, out: Path, shares: list[list[ClientId]], rounds: int | None) -> str:
    """Write the job of a configuration, and return how to run it."""
    values = {
        "name": NAME,
        "config": "config.yaml.txt",  # without omegaconf, `nvflare job submit` fails on .yaml, and on some with it
        "count": str(len(shares)),
        "sites": json.dumps(_sites(shares)),
        "checkpoint": str(out / "last.ckpt"),
        "state_dir": repr(str(out / "sites")),
    }
    job = out / "job"
    made = write_app(who, config, Path(__file__).parent / "app", out, job / "app" / "custom" / NAME, rounds, values)
    return f"{made} {job}, which `nvflare job submit -j {job}` gives to a FLARE server."


def _sites(shares: Sequence[Sequence[ClientId]]) -> dict[str, list[ClientId]]:
    return {f"site-{number}": list(share) for number, share in enumerate(shares, 1)}


def run(who: str, out: Path, shares: list[list[ClientId]]) -> None:
    """Run the job in FLARE's simulator, with a process for each share of the clients."""
    print(f"FLARE's simulator starts {len(shares)} sites; its logs are in {out / 'workspace'}.", flush=True)
    with simulator(out / "job", out / "workspace", list(_sites(shares))) as process:
        status = process.wait()
    if status:
        raise FederatedError(f"{who}: the simulator has ended with {status}. Its log is above.")


@contextmanager
def simulator(
    job: Path,
    workspace: Path,
    sites: Sequence[str],
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
) -> Iterator["psutil.Popen"]:
    """Run a job in FLARE's simulator; all its processes end with the context, and print to ``log`` if it is given."""
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(job), "-w", str(workspace)]
    words = ["-c", ",".join(sites), "-t", str(len(sites))]
    process = psutil.Popen([*command, *words], env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):  # it has ended, and all others with it
            running = [process, *process.children(recursive=True)]
            for one in running:
                with suppress(psutil.NoSuchProcess):
                    one.terminate()
            for one in psutil.wait_procs(running, _PATIENCE)[1]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait()
