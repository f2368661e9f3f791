"""The command that writes an app from a configuration, and the files of the example."""

import importlib
import io
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from lightning_fed.cli.main import main
from lightning_fed.deploy import FederatedSite
from lightning_fed.deploy.flower import configured
from tests.docs.test_examples import load

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def test_the_app_of_a_configuration_is_what_flower_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "app"
    words = ["deploy", "flower", "--config", QUICKSTART, "--out", str(out), "--run", "false"]
    main(words)
    assert f"flwr run {out}" in capsys.readouterr().out
    config, warnings = load_and_validate(out / "pyproject.toml")
    assert config
    assert all("license" in warning for warning in warnings), "which is the user's to choose"
    assert "federated_app/config.yaml" in sent(out)
    monkeypatch.syspath_prepend(str(out))
    task = importlib.import_module("federated_app.task")
    for side in ("client", "server"):
        importlib.import_module(f"federated_app.{side}_app")
    monkeypatch.delitem(sys.modules, "federated_app")
    assert task.client_ids() == list(range(30))
    assert len(task.make_val()) == 179
    with FederatedSite(task.make_trainer(), task.make_model(), task.make_data({}), [3, 4], tmp_path / "site") as site:
        assert site.client_ids == [3, 4]
    with pytest.raises(SystemExit, match="has an app already"):
        main(words)


def sent(app: Path) -> set[str]:
    """Return the names of the files that Flower sends to the sites."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as archive:
        return set(archive.namelist())


def test_clients_are_dealt_out_to_the_sites(tmp_path: Path) -> None:
    assert configured.share_clients([0, 1, 2, 3, "x"], 2) == [[0, 2, "x"], [1, 3]]
    words = ["deploy", "flower", "--config", QUICKSTART, "--run", "false", "--out"]
    for sites, said in (("31", "is more than the 30 clients"), ("0", "sites")):
        with pytest.raises(SystemExit, match=said):
            main([*words, str(tmp_path / sites), "--sites", sites])
    with pytest.raises(SystemExit, match=r"none.yaml"):
        main(["deploy", "flower", "--config", "none.yaml"])


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
