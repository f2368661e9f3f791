"""The files of the example of a run over sites."""

import importlib
import io
import re
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.common.config import parse_config_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from lightning_fed.deploy import FederatedSite
from tests.docs.test_examples import load

ROOT = Path(__file__).parents[3]


def sent(app: Path) -> set[str]:
    """Return the names of the files that Flower sends to the sites."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as archive:
        return set(archive.namelist())


def example(name: str) -> Any:
    return load(ROOT / "examples" / "deploy" / f"{name}.py")


def test_example_creates_a_server_certificate_and_site_keys(tmp_path: Path) -> None:
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


def test_example_app_loads_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_documented_installation_has_what_the_example_imports() -> None:
    """Its sites read tables."""
    for name in ("README.md", "Dockerfile", "pyproject.toml"):
        found = re.findall(r"lightning_fed\[(.*?)\]", (ROOT / "examples" / "deploy" / name).read_text(encoding="utf-8"))
        assert found == ["flower,tables"], name


FOLDER = ROOT / "examples" / "deploy"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))
ENVIRONMENT = {"SUPERLINK": "server.example:8000", "CLIENT": "bank", "TABLE": "/srv/bank.csv"}
PARSERS = {"flower-superlink": _parse_args_run_superlink, "flower-supernode": _parse_args_run_supernode}


def commands() -> dict[str, list[str]]:
    """Return the commands of the units and of the compose file, as words."""
    found = {}
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=(.*?[^\\])$", unit.read_text(), re.MULTILINE | re.DOTALL)
        found[unit.stem] = shlex.split(line.replace("\\\n", " "))
    for name, service in yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"].items():
        command = service["command"]
        found[f"compose {name}"] = shlex.split(command) if isinstance(command, str) else command
    return {name: [replaced(word) for word in words] for name, words in found.items()}


def replaced(word: str) -> str:
    return re.sub(r"\$\{(\w+)[^}]*\}", lambda found: ENVIRONMENT[found[1]], word)


@pytest.mark.parametrize("name", ["lenders-superlink", "lenders-site", "compose superlink", "compose site"])
def test_flower_accepts_the_commands_of_units_and_compose_file(name: str) -> None:
    program, *words = commands()[name]
    said = PARSERS[Path(program).name]().parse_args(words)
    if "site" in name:
        config = parse_config_args([said.node_config])
        assert config.keys() == {"client-id", "table", "state-dir"}
        assert config["client-id"] == "bank"
        assert said.root_certificates.endswith("ca.crt")
    else:
        assert said.enable_supernode_auth
        assert (said.host, said.port, said.database) == ("0.0.0.0", 8000, "link.db")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze, which checks units")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    here = str(Path(sys.executable).parent)
    (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/lenders/bin", here))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert unit.name not in done.stderr
    assert "Restart=always" in unit.read_text()
    assert "StartLimitIntervalSec=0" in unit.read_text(), "systemd gives up after five starts in ten seconds otherwise"


def test_containers_restart_check_their_health_and_rotate_logs() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    image = (FOLDER / "Dockerfile").read_text()
    assert set(services) == {"superlink", "site"}
    for service in services.values():
        assert service["restart"] == "always"
        assert service["logging"]["options"]["max-file"]
        _, python, script, url, *_ = service["healthcheck"]["test"]
        assert (python, f"COPY healthcheck.py {script}" in image) == ("python", True)
        assert url.endswith("/health")
    copied = re.findall(r"^COPY (\S+)", image, re.MULTILINE)
    assert all((FOLDER / name).is_file() for name in copied)


def test_health_check_queries_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    check = example("healthcheck").is_healthy
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}"
        assert check(f"{where}/health")
        assert not check(f"{where}/other")
        server.shutdown()
    assert not check(f"{where}/health")
    assert "refused" in capsys.readouterr().err
