"""Flower's part of ``lightning-fed deploy``."""

from pathlib import Path

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.configured import NAME, write_app
from lightning_fed.deploy.flower.local import LocalFlower

_NOT_SENT = "/flower/\n/logs/\n/sites/\n/lightning_logs/\n*.ckpt*\n"  # to sites: files of a run next to the app


def write(who: str, config: Path, out: Path, shares: list[list[ClientId]], rounds: int | None) -> str:
    """Write the app of a configuration, and return how to run it."""
    write_app(who, config, Path(__file__).parent / "app", out, out / NAME, rounds, {"name": NAME})
    (out / ".gitignore").write_text(_NOT_SENT, encoding="utf-8")
    return f"Made {out}: the app, which `flwr run {out}` starts where a SuperLink is."


def run(who: str, out: Path, shares: list[list[ClientId]]) -> None:
    """Run the app with a SuperLink and a SuperNode for each share of the clients, on this machine."""
    nodes = [
        f'client-id="{",".join(map(str, share))}" state-dir="{out / "sites" / str(number)}"'
        for number, share in enumerate(shares)
    ]
    print(f"SuperLink and {len(nodes)} SuperNodes start on this machine; their logs are in {out / 'logs'}.", flush=True)
    with LocalFlower(out, nodes) as flower:
        number = flower.submit(out)
        flower.follow(number)
        status = flower.status(number)
    if status != "finished:completed":
        raise FederatedError(f"{who}: the run is {status}. Its log is above, those of Flower in {flower.logs}.")
