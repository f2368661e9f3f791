"""The site lists every page and builds. Configurations and commands in the documentation are valid."""

import ast
import io
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import yaml

from lightning_fed._version import __version__
from lightning_fed.cli.data import make_parser as data_parser
from lightning_fed.cli.main import FederatedCLI, main
from lightning_fed.lab.catalogue import CATALOGUE
from lightning_fed.lab.diagnosis.command import _split
from tests.docs.test_docs import PAGES, ROOT
from tests.helpers.command_line import one_stage
from tests.helpers.selection import few

SITE = ROOT / "mkdocs.yml"
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
CONFIGURATION = {"seed_everything", "model", "data", "trainer", "optimizer", "lr_scheduler", "ckpt_path"}
FIT = {"fit", "validate", "test", "predict"}


@pytest.fixture(autouse=True)
def _command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the arguments, make the example's module importable, and restore the variables of the seed."""
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "cli"))
    monkeypatch.setitem(sys.modules, "my_package", SimpleNamespace(mixed_up=lambda batch, generator: batch))
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


# The site


@cache
def site() -> dict[str, Any]:
    """Return mkdocs.yml, with None for values with tags."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    return dict(yaml.load(SITE.read_text(), Loader))


def named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from named(entry)


def test_navigation_lists_every_page_once() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert site()["not_in_nav"].split() == ["papers/*_details.md"]
    found = list(named(site()["nav"]))
    assert len(found) == len(set(found))
    made = {"changelog.md", "contributing.md", "examples.md", "api/index.md"} | {
        f"api/{name}.md" for name in reference()
    }
    assert set(found) == {page for page in pages if not page.endswith("_details.md")} | made


def test_menu_titles_match_the_reference() -> None:
    titles = dict(entry for each in site()["nav"] for entry in titled(each))
    assert {name: titles[f"api/{name}.md"] for name in reference()} == {
        n: page["title"] for n, page in reference().items()
    }


def titled(nav: Any) -> Iterator[tuple[str, str]]:
    """Yield the pages of a part of the navigation, each with its title there, if any."""
    if isinstance(nav, dict):
        for title, inner in nav.items():
            if isinstance(inner, str):
                yield inner, title
            else:
                yield from (entry for each in inner for entry in titled(each))


@pytest.mark.thorough
def test_results_index_is_up_to_date() -> None:
    spec = spec_from_file_location("papers_index", ROOT / "docs" / "papers_index.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    pages = script.all_pages()
    assert (ROOT / "docs" / "papers" / "index.md").read_text() == script.index(pages), "run docs/papers_index.py"
    assert CATALOGUE.read_text() == script.catalogue(pages), "run docs/papers_index.py"
    large = [path.name for path in (ROOT / "docs" / "papers").iterdir() if path.stat().st_size > 200_000]
    assert not large


def test_citation_matches_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


@cache
def reference() -> dict[str, Any]:
    """Return the pages of the reference."""
    return dict(yaml.safe_load((ROOT / "docs" / "reference.yaml").read_text()))


def test_reference_lists_each_public_name_once() -> None:
    public: dict[str, set[str]] = {}
    for path in (ROOT / "lightning_fed").rglob("__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = {name for name in ast.literal_eval(node.value) if not name.startswith("__")}
                public[".".join(path.parent.relative_to(ROOT).parts)] = names
    shown = [(package, name) for page in reference().values() for package, ns in page["names"].items() for name in ns]
    assert not [f"{package}.{name}" for package, name in shown if name not in public.get(package, ())]
    names = [name for _, name in shown]
    assert len(names) == len(set(names))
    assert set(names) == set().union(*public.values())


def test_links_have_titles_instead_of_file_names() -> None:
    faults = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        faults += [f"{page.name}: {match[0]}" for match in re.finditer(r"\[`?[\w/.]+\.md`?\]\([^)]+\)", text)]
    assert not faults


def test_code_has_at_most_76_columns() -> None:
    """They fit on the site at 1280 pixels. Program output may be wider."""
    faults = []
    for page in (path for path in PAGES if path.parent.name != "papers" and path.name != "README.md"):
        text = page.read_text()
        parts = list(re.finditer(r"^```(?!text|math)\w+\n.*?^```$", text, flags=re.M | re.S))
        plain = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
        parts += list(re.finditer(rf"^ {{4}}(?:{'|'.join(STARTS)}).*$", plain, flags=re.M))
        for part in parts:
            wide = [line for line in part[0].splitlines() if len(line.removeprefix("    ")) > 76]
            faults += [f"{page.name}: {line}" for line in wide]
    assert not faults, "\n".join(faults)


@pytest.mark.thorough
@pytest.mark.parametrize("address", [None, "https://example.org/me/lightning_fed"])
def test_repository_address_links_pages_and_names_to_sources(address: str | None) -> None:
    pytest.importorskip("mkdocs", reason='no MkDocs, which builds the site: pip install -e ".[docs]"')
    hooks = module_at("build_hooks", ROOT / "docs" / "build_hooks.py")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="contributing.md"), meta={}, edit_url=None)
    config = SimpleNamespace(repo_url=address)
    text = hooks.on_page_markdown("[pins](constraints.txt)\n\n> [!NOTE]\n> Two\n> lines.\n", page, config, None)
    link = f"[pins]({address}/blob/main/constraints.txt)" if address else "pins (`constraints.txt`)"
    assert text == f"{link}\n\n!!! note\n    Two\n    lines.\n"
    assert page.edit_url == (f"{address}/edit/main/CONTRIBUTING.md" if address else None)
    link = (
        '<a href="/" class="md-source" data-md-component="source">'  # the theme's script would query GitHub for stars
    )
    assert hooks.on_post_page(link, page, config) == '<a href="/" class="md-source">'
    extensions = hooks.griffe.Extensions(hooks.Docstrings(address))
    loaded = hooks.griffe.load("lightning_fed.core.errors", search_paths=[str(ROOT)], extensions=extensions)
    shown = loaded["FederatedError"].docstring.value
    plain = hooks.griffe.load("lightning_fed.core.errors", search_paths=[str(ROOT)])["FederatedError"].docstring.value
    assert shown.partition("\n\n")[0] == plain.partition("\n\n")[0]  # tables show this part
    assert (f'href="{address}/blob/main/lightning_fed/core/errors.py#L' in shown) == (address is not None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    pytest.importorskip("mkdocs", reason='no MkDocs, which builds the site: pip install -e ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SITE), "-d", str(folder)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.thorough
def test_site_builds_without_warnings_or_external_resources(built: Path) -> None:
    formulas = (built / "methods.html").read_text()
    assert formulas.count("<math") > 100
    assert "\\(" not in re.sub(r"<code.*?</code>", "", formulas, flags=re.S)
    for path in built.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img)[^>]* src="?([^">\s]+)|<link[^>]* rel="?stylesheet[^>]*', path.read_text()
        )
        assert not [address for address in fetched if "//" in address], path.name
    assert not [path.name for path in built.rglob("*") if path.suffix in {".py", ".pyc", ".yaml"}]
    assert '<div class="admonition warning">' in (built / "export.html").read_text()
    pages = {path.name: re.sub(r"<code.*?</code>", "", path.read_text(), flags=re.S) for path in built.rglob("*.html")}
    assert not [name for name, text in pages.items() if "[!WARNING]" in text]
    for path in (built / "api").glob("*.html"):
        found = re.search(r":(?:class|math|meth):|\.\. math::|={8}|``", path.read_text())
        assert found is None, f"{path.name}: {found}"


@pytest.mark.thorough
def test_reference_page_has_a_table_and_no_overridden_hooks(built: Path) -> None:
    methods, writing, callbacks, models = (
        (built / "api" / f"{name}.html").read_text() for name in ("algorithms", "writing", "callbacks", "models")
    )
    heading = methods.index('id="lightning_fed.algorithms.FedAvg"')
    assert "Stochastic controlled averaging." in methods[:heading]
    assert 'id="lightning_fed.algorithms.Scaffold"' in methods
    assert 'id="lightning_fed.algorithms.Algorithm.begin_client"' in writing
    assert 'id="lightning_fed.algorithms.Scaffold.begin_client"' not in methods
    assert 'id="lightning_fed.FederatedCallback.on_round_end"' in callbacks
    assert 'id="lightning_fed.callbacks.RoundLogger.on_fit_start"' not in callbacks  # Lightning's hook
    assert 'id="lightning_fed.models.MLPClassifier.forward"' not in models
    assert 'id="lightning_fed.FederatedTrainer.fit"' in (built / "api" / "trainer.html").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_browser_renders_every_page_correctly(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    look = site_check()
    if look.browser() is None:
        pytest.skip(f"no browser that shows the site: install one of {', '.join(look.BROWSERS)}")
    code = look.main([str(built), "--timeout", "1200"])
    assert code == 0, capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("<p>all is well</p>", None),
        ('<div style="width:700px">wide</div>', 'at 500 px: reaches 200 px beyond the window: div "wide"'),
        ('<div style="width:1400px">wide</div>', "at 1280 px: the page scrolls sideways: it is 1400 px wide"),
        ('<div style="overflow:auto"><div style="width:1400px">may scroll</div></div>', None),
        ('<img src="none.png" style="width:9px">', "a picture is missing: none.png"),
        ('<link rel="stylesheet" href="none.css">', "/none.css is missing"),
        ("<script>wrong()</script>", "a script failed: Uncaught ReferenceError: wrong is not defined"),
        (
            '<table><td style="width:9em;max-width:9em"><code>one-word-with-hyphens</code></table>',
            "breaks a line within one-",
        ),
        (
            f"<pre style='overflow:auto;width:300px'><code style='display:block;overflow:auto'>{'x' * 99}</code></pre>",
            None,
        ),
        (
            f"<div><pre><code style='display:block;width:300px;overflow:auto'>{'x' * 99}</code></pre></div>",
            "scrolls sideways by",
        ),
    ],
)
def test_site_check_detects_page_faults(
    content: str, fault: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    look = site_check()
    if look.browser() is None:
        pytest.skip(f"no browser that shows the site: install one of {', '.join(look.BROWSERS)}")
    style = "<style>.narrow {display: block; width: 300px; overflow: auto}</style>"
    (tmp_path / "index.html").write_text(f'<!doctype html>{style}<body style="margin:0">{content}')
    code = look.main([str(tmp_path), "--timeout", "60"])
    shown = capsys.readouterr().out
    assert (code, "0 faults" in shown) == ((0, True) if fault is None else (1, False)), shown
    assert fault is None or fault in shown


@cache
def site_check() -> Any:
    return module_at("site_check", ROOT / ".ci" / "site_check.py")


def module_at(name: str, path: Path) -> Any:
    """Return a script as a module."""
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Configurations and commands


class Parsed(FederatedCLI):
    """The command line without its last steps: it neither instantiates classes nor runs a command."""

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@cache
def command_line(stage: str | None) -> Parsed:
    """Return the command line with one of Lightning's commands, or without commands, for a configuration."""
    args = [*([] if stage is None else [stage]), "--config", QUICKSTART]
    with nullcontext() if stage is None else one_stage(stage):
        return Parsed(
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            args=args,
            run=stage is not None,
        )


def parse(args: list[str], run: bool = True) -> None:
    made = command_line(args[0] if run else None)
    made.parse_arguments(made.parser, args)


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def configurations() -> list[Any]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(r"^```yaml\n(.*?)^```$", text, flags=re.M | re.S):
            content = yaml.safe_load(block[1])
            if set(content) <= CONFIGURATION:
                found.append(pytest.param(content, id=f"{page.name}:{line_of(text, block.start())}"))
    return found


@pytest.mark.parametrize("content", few(configurations(), [shown.id for shown in configurations()[::3]]))
def test_documented_configuration_can_be_parsed(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "shown.yaml"
    path.write_text(yaml.safe_dump(content))
    below = [] if {"model", "data", "trainer"} <= set(content) else ["--config", QUICKSTART]
    parse([*below, "--config", str(path)], run=False)


@pytest.mark.parametrize("wrong", ["trainer: {max_round: 3}", "data: {class_path: lightning_fed.data.Digit}"])
def test_configuration_with_an_unknown_name_is_rejected(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        test_documented_configuration_can_be_parsed(yaml.safe_load(wrong), tmp_path)


STARTS = ("lightning-fed ", "python ", "srun ", "torchrun ", "pytest ", "pip ")


def commands(every: bool) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each command in indented blocks and inline code.

    Runs take long to parse: without ``every``, skip those without a new option.
    """
    options: set[str] = set()
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), page.read_text(), flags=re.M | re.S)
        joined = re.sub(r" *\\\n +", " ", text)
        indented = re.finditer(r"^ {4,}(.+)$", joined, flags=re.M)
        inline = re.finditer(r"(?<!`)`([^`]+)`", re.sub(r"^ {4,}.*$", "", joined, flags=re.M))
        for match in (*indented, *inline):
            place = f"{page.name}:{line_of(joined, match.start())}"
            line = re.sub(r"\s+", " ", re.sub(r"\s+#.*$", "", match[1]))
            parts = [part for part in line.split(" && ") if part.startswith(STARTS) and "..." not in part]
            for part in parts:
                if re.match(r"lightning-fed (fit|test|val|pred)", part):
                    of_run = set(re.findall(r"--[\w.]+", part))
                    if of_run <= options and not every:
                        continue
                    options |= of_run
                yield place, part


def check(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a command's program, files and options exist."""
    words = shlex.split(re.sub(r"[\[\]]", " ", command) if command.startswith("lightning-fed") else command)
    if words[0] == "srun":
        words = words[1:]
    if words[:3] == ["python", "-m", "lightning_fed"]:
        words = ["lightning-fed", *words[3:]]
    if words[0] == "lightning-fed":
        check_own(words[1:], capsys)
    elif words[0] == "pip":
        check_installation(words)
    elif words[0] == "pytest" or words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests"))
    else:
        script = next((word for word in words if word.endswith(".py")), None)
        if script is not None and "/" in script:  # train.py is the reader's own
            sources = "".join(path.read_text() for path in (ROOT / script).parent.glob("*.py"))
            assert (ROOT / script).exists()
            missing = [
                word for word in words[words.index(script) :] if word.startswith("--") and f'"{word}"' not in sources
            ]
            assert not missing


def check_own(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command, *args = words or [""]
    if command in FIT | {"data"} and args:  # else only the command is named
        for i, word in enumerate(args[:-1]):
            if word == "--config" and not (ROOT / args[i + 1]).exists():
                assert "/" not in args[i + 1], f"there is no {args[i + 1]}"
                args[i + 1] = QUICKSTART  # names without a folder are the reader's files
            elif word == "--config":
                args[i + 1] = str(ROOT / args[i + 1])
        code: Any = None
        try:
            data_parser().parse_args(args) if command == "data" else parse([command, *args])
        except SystemExit as end:  # --print_config also exits, without a code
            code = end.code
        assert not code, capsys.readouterr().err
    elif command not in FIT | {"data"}:
        if command == "diagnose":
            args, options = _split(args)
            check_own(["fit", "--config", "configs/quickstart.yaml", *options], capsys)
        shown = help_of(command)
        assert not [word for word in args if word.startswith("--") and word not in shown]


@cache
def help_of(command: str) -> str:
    with redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert not end.value.code
    return shown.getvalue()


def check_installation(words: list[str]) -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        for names in re.findall(r"^(?:\.|lightning_fed)\[(.+)\]$", word):
            assert set(names.split(",")) <= set(extras)
    assert "-c" not in words or (ROOT / words[words.index("-c") + 1]).exists()


@pytest.mark.thorough
@pytest.mark.parametrize("every", [False, True])
def test_documented_commands_are_valid(every: bool, capsys: pytest.CaptureFixture[str]) -> None:
    shown, faults = list(commands(every)), []
    assert len(shown) > 100
    for place, command in shown:
        try:
            check(command, capsys)
        except (AssertionError, SystemExit) as error:
            faults.append(f"{place}: {command}: {error}")
    assert not faults, "\n".join(faults)


def summary(text: str) -> dict[str, str]:
    """Return the rows that a run prints at its end, by name without "(round N)"."""
    shown = text.partition("Federated run finished\n")[2]
    rows = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in shown.partition("\n\n")[0].splitlines()]
    return {re.sub(r" \(round \d+\)", "", name): value for name, value in rows}


def megabytes(text: str) -> list[float]:
    units = {"B": 1e-6, "kB": 1e-3, "MB": 1.0}
    return [float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) (B|kB|MB)", text)]


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [1, 50])
def test_quickstart_output_matches_a_run(
    rounds: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "pytorch_lightning")  # the pages' commands may have silenced it
    with one_stage("fit"):
        main(["fit", "--config", QUICKSTART, "--trainer.max_rounds", str(rounds)])
    printed = summary(capsys.readouterr().out)
    written = summary((ROOT / "docs" / "quickstart.md").read_text())
    assert list(printed) == list(written)
    assert written["rounds"] == "50"
    sent = [rounds / 50 * size for size in megabytes(written["bytes up / down"])]
    assert megabytes(printed["bytes up / down"]) == pytest.approx(sent, rel=0.01)
    if rounds == 50:
        exact = ("method", "clients seen", "bytes up / down", "logs", "watch")
        assert {name: printed[name] for name in exact} == {name: written[name] for name in exact}
        for name in ("val_acc", "val_loss"):
            assert float(printed[name].split()[0]) == pytest.approx(float(written[name].split()[0]), abs=0.05)


@pytest.mark.parametrize(
    "command",
    [
        "lightning-fed fit --config configs/quickstart.yml",
        "lightning-fed fit --config configs/quickstart.yaml --trainer.algorithms FedAvg",
        "lightning-fed dat --config configs/quickstart.yaml",
        "python benchmarks/soak.py --round 5x",
        "python benchmarks/soaks.py",
        'pip install -e ".[doc]"',
        "pytest tests/orakel",
    ],
)
def test_unknown_command_is_detected(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(command, capsys)


def test_quickstart_quotes_errors_that_the_package_raises() -> None:
    page = (ROOT / "docs/quickstart.md").read_text().partition("## Common errors")[2]
    code = "".join(path.read_text() for path in (ROOT / "lightning_fed").rglob("*.py"))
    quoted = [text.removesuffix(" ...") for text in re.findall(r"^- \*\*`([^`]+)`\*\*", page, re.MULTILINE)]
    assert len(quoted) == 4
    written = {  # as in the code; the first one is PyTorch's
        "operator torchvision::nms does not exist": "",
        "a class of the package pytorch_lightning, while lightning_fed uses lightning": ", while lightning_fed uses {",
        "The checkpoint's method is": "{origin.name}'s {what} is ",
    }
    assert not [text for text in quoted if written.get(text, text) not in code]
