"""The files of the example of a run over sites."""

import importlib
import io
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from lightning_fed.deploy import FederatedSite
from tests.docs.test_examples import load

ROOT = Path(__file__).parents[3]


def sent(app: Path) -> set[str]:
    """Return the names of the files that Flower sends to the sites."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as archive:
        return set(archive.namelist())


def example(name: str) -> Any:
    return load(ROOT / "examples" / "deploy" / f"{name}.py")


def test_the_examples_certificates_are_for_the_server_and_keys_for_each_site(tmp_path: Path) -> None:
    example("certificates").make_certificates(tmp_path / "c", ["server.example", "127.0.0.1"])
    ca, server = (x509.load_pem_x509_certificate((tmp_path / "c" / n).read_bytes()) for n in ("ca.crt", "server.pem"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    from flwr.cli.supernode.register import try_load_public_key

    for site in ("hospital-north", "hospital-south", "bank"):
        assert stat.S_IMODE((tmp_path / "c" / f"{site}.key").stat().st_mode) == 0o600
        try_load_public_key(tmp_path / "c" / f"{site}.pub")
    assert isinstance(server.public_key(), ec.EllipticCurvePublicKey)


def test_the_examples_app_takes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example("tables").write_tables(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "deploy"))
    task, server = (importlib.import_module(f"lenders.{name}") for name in ("task", "server_app"))
    for client in server.CLIENTS:
        data = task.make_data({"table": str(tmp_path / f"{client}.csv")})
        with FederatedSite(task.make_trainer(), task.make_model(), data, client, tmp_path / client):
            pass
    config, _ = load_and_validate(ROOT / "examples" / "deploy" / "pyproject.toml")
    assert config["tool"]["flwr"]["app"]["components"]["serverapp"] == "lenders.server_app:app"
    code = {f"lenders/{name}.py" for name in ("__init__", "client_app", "server_app", "task")}
    assert {name for name in sent(ROOT / "examples" / "deploy") if not name.startswith(".info")} == {
        *code,
        "pyproject.toml",
    }, "neither data nor keys are sent to the sites"
