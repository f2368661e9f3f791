"""Hooks of MkDocs: generated pages, links to files outside ``docs``, notes, tables, formulas and docstrings.

``mkdocs build --strict`` runs them. The pages also read well in the repository, without this script.
"""

import importlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree import ElementTree

import griffe
import yaml
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
MADE_OF = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "examples.md": "examples/README.md"}
HIDDEN = {"index.md": ["navigation"], "examples.md": ["navigation", "toc"]}  # room for cards, and for whole files
BRANCH = "main"  # the repository's branch, for links to its files
_LONG = 40  # a table's cell may break code of at least this length
KEPT = {"FederatedTrainer"}  # users call its overridden members
LISTED = {
    "Algorithm",
    "FederatedTrainer",
    "FederatedCallback",
    "FederatedDataModule",
}  # long enough for their own table
_SHOWN = {".py": "python", ".yaml": "yaml"}
REUSED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let readers edit pages if the repository has an address, and choose a version if ``mike`` builds the site."""
    if config.repo_url:
        config.edit_uri = f"edit/{BRANCH}/docs/"
    if os.environ.get("MIKE_DOCS_VERSION"):
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages: the changelog, the contributor's guide, the examples and the reference."""
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        files.append(File.generated(config, REUSED[name], content=(ROOT / name).read_text()))
    files.append(File.generated(config, "examples.md", content=_examples()))
    for name, content in _reference():
        files.append(File.generated(config, f"api/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn notes into admonitions, and links to files of the repository into links to their pages.

    A file without a page becomes a link to the repository. Without the repository's address, it becomes its path.
    """
    page.meta["hide"] = HIDDEN.get(page.file.src_uri, [])
    source = MADE_OF.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = (ROOT / source).parent
    if config.repo_url and page.file.src_uri in MADE_OF:
        page.edit_url = f"{config.repo_url.rstrip('/')}/edit/{BRANCH}/{source}"

    def redirected(match: re.Match[str]) -> str:
        text, target = match.groups()
        name, _, fragment = target.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return match.group(0)
        path = (folder / name).resolve()
        if (path / "README.md").exists() and path.is_relative_to(ROOT / "docs"):
            path /= "README.md"
        if not path.is_relative_to(ROOT):
            return match.group(0)
        inside = path.relative_to(ROOT).as_posix()
        if inside.startswith("docs/") and files.get_file_from_path(inside.removeprefix("docs/")):
            here = inside.removeprefix("docs/")
        elif inside in REUSED:
            here = REUSED[inside]
        elif inside.startswith("examples"):
            here, fragment = "examples.md", _anchor(inside.partition("/")[2]) if path.suffix in _SHOWN else ""
        elif config.repo_url:
            return f"[{text}]({_in_repository(config.repo_url, inside)})"
        else:
            return text if text.startswith("`") else f"{text} (`{inside}`)"
        up = "../" * page.file.src_uri.count("/")
        return f"[{text}]({up}{here}{'#' if fragment else ''}{fragment})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    return "".join(
        part if part.startswith("```") else re.sub(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)", redirected, _admonitions(part))
        for part in parts
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML, which browsers show without scripts, and let only long code break in tables."""
    cell = r"<t[dh][ >].*?</t[dh]>"
    html = re.sub(cell, lambda m: re.sub(rf"<code>([^<]{{{_LONG},}})</code>", _long, m[0]), html, flags=re.S)
    inline = r'<span class="arithmatex">\\\((.*?)\\\)</span>'
    block = r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>'
    html = re.sub(inline, lambda m: _mathml(m[1], "inline"), html, flags=re.S)
    return re.sub(block, lambda m: _mathml(m[1], "block"), html, flags=re.S)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Leave out the theme's request for the repository's stars, so that readers' browsers contact no other host."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same for pages such as 404.html."""
    return output_content.replace(' data-md-component="source"', "")


class Docstrings(griffe.Extension):
    """Turn docstrings, which are written for ``help``, into Markdown, and leave out overridden members.

    Args:
        repository: The repository's address, for links to the code; None for no links.
    """

    def __init__(self, repository: str | None = None) -> None:
        self.repository = repository

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value)
            if self.repository and (obj.is_class or obj.is_function):
                file = Path(str(obj.filepath)).resolve().relative_to(ROOT.resolve()).as_posix()
                address = f"{_in_repository(self.repository, file)}#L{obj.lineno}-L{obj.endlineno}"
                summary, _, rest = obj.docstring.value.partition("\n\n")  # tables show the first paragraph
                obj.docstring.value = f'{summary}\n\n<a class="doc-source" href="{address}">source</a>\n\n{rest}'

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Leave out members that a class inherits and overrides: the page of the base class describes them."""
        for cls in _classes(pkg):
            if cls.name not in KEPT:
                for name in _inherited(cls) & cls.members.keys() - {"__init__"}:
                    cls.del_member(name)


def _classes(module: griffe.Module) -> list[griffe.Class]:
    """Return the classes of a module and its submodules, derived classes before their bases."""
    found = [cls for cls in module.classes.values() if isinstance(cls, griffe.Class)]
    for inner in module.modules.values():
        found += _classes(inner) if isinstance(inner, griffe.Module) else []
    return sorted(found, key=lambda cls: -len(cls.mro()))


def _inherited(cls: griffe.Class) -> set[str]:
    """Return the names that a class inherits, also from Lightning and PyTorch if its module can be imported."""
    try:
        found = getattr(importlib.import_module(cls.module.path), cls.name, object)
    except ImportError:  # the module needs an optional package
        return {name for base in cls.mro() for name in base.members}
    return {name for base in found.__mro__[1:] for name in vars(base)}


def _admonitions(markdown: str) -> str:
    """Turn the notes of Markdown (quotes that begin with ``[!WARNING]`` or another kind) into admonitions."""

    def admonition(note: re.Match[str]) -> str:
        lines = [line.removeprefix(">").removeprefix(" ") for line in note[2].splitlines()]
        return "\n".join([f"!!! {note[1].lower()}", *(f"    {line}".rstrip() for line in lines)]) + "\n"

    return re.sub(r"^> \[!(\w+)\]\n((?:>.*(?:\n|$))+)", admonition, markdown, flags=re.M)


def _in_repository(address: str, path: str) -> str:
    return f"{address.rstrip('/')}/blob/{BRANCH}/{path}"


def _long(code: re.Match[str]) -> str:
    """Return code that may break only between its words."""
    words = " ".join(f"<span>{word}</span>" for word in code[1].split())
    return f'<code class="long">{words}</code>'


def _markdown(text: str) -> str:
    """Return reStructuredText as Markdown: formulas, tables, roles, literals, blocks after a double colon."""
    text = re.sub(r"^( *)\.\. math::(.*\n(?:\1 {4}.*\n|\s*\n)*)", _fenced, f"{text}\n", flags=re.M)
    text = re.sub(r"^(=+(?: +=+)+)\n(.*\n)\1\n((?:.*\n)+?)\1$", _table, text, flags=re.M)
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r":(?:class|func|meth|attr|data|mod):`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`\n]+)``", r"`\1`", text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.M)  # under this heading, doctests are code
    return re.sub(r"::(\n\n +)", r":\1", text).rstrip()


def _fenced(directive: re.Match[str]) -> str:
    return f"```math\n{dedent(directive[2]).strip()}\n```\n\n"


def _table(table: re.Match[str]) -> str:
    starts = [column.start() for column in re.finditer("=+", table[1])]
    cuts = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    head, *rows = ([line[cut].strip() for cut in cuts] for line in (table[2] + table[3]).splitlines())
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def _mathml(formula: str, display: str) -> str:
    """Return a formula as MathML. A formula that cannot be read ends the build."""
    formula = formula.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    for latex, same in (("{aligned}", "{split}"), (r"\lvert", r"\left|"), (r"\rvert", r"\right|")):
        formula = formula.replace(latex, same)
    formula = formula.replace(r"\lVert", r"\left\|").replace(r"\rVert", r"\right\|")
    if "&" in formula and r"\begin" not in formula:  # Sphinx aligns such formulas implicitly
        formula = rf"\begin{{split}}{formula}\end{{split}}"
    mathml = convert(formula.strip(), display=display)
    try:
        ElementTree.fromstring(mathml)  # noqa: S314  # made on the line above
    except ElementTree.ParseError as error:
        raise ValueError(f"this formula cannot be read: {formula}") from error
    return mathml


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _examples() -> str:
    """Return the index of the examples, and below it each file unchanged."""
    parts = [(ROOT / "examples" / "README.md").read_text()]
    for path in sorted(p for p in (ROOT / "examples").rglob("*") if p.suffix in _SHOWN):
        name = path.relative_to(ROOT / "examples").as_posix()
        heading = name.replace("__", r"\_\_")  # or Markdown makes it bold
        parts.append(f"## {heading}\n\n```{_SHOWN[path.suffix]}\n{path.read_text()}```\n")
    return "\n".join(parts)


@cache
def _package() -> griffe.Object | griffe.Alias:
    """Return the package as its files define it, without importing it."""
    return griffe.load("lightning_fed", search_paths=[str(ROOT)], resolve_aliases=True)


def _defined(name: str) -> griffe.Object | griffe.Alias:
    """Return the class, function or attribute of a public name."""
    found = _package()[name.removeprefix("lightning_fed.")]
    return found[found.name] if found.is_module else found  # a function in a module of its name


def _public() -> Iterator[str]:
    """Yield the path of each definition that a package exports, once if several packages export it."""
    paths = {"lightning_fed": _package()}
    for path in (ROOT / "lightning_fed").rglob("*/__init__.py"):
        name = ".".join(path.parent.relative_to(ROOT).parts)
        paths[name] = _package()[name.removeprefix("lightning_fed.")]
    exported = {f"{name}.{each}" for name, package in paths.items() for each in package.exports or ()}
    yield from {_defined(name).canonical_path for name in exported if not name.endswith("__")}


def _reference() -> Iterator[tuple[str, str]]:
    """Yield the pages of the reference: a table of the names, then each name.

    Raises:
        ValueError: If docs/reference.yaml lacks a public name, repeats one, or has one that no package exports.
    """
    entries = yaml.safe_load((ROOT / "docs" / "reference.yaml").read_text())
    overview, found = ["| page | names |", "| --- | --- |"], Counter[str]()
    for file, entry in entries.items():
        names = [f"{package}.{name}" for package, names in entry["names"].items() for name in names]
        defined = {name: _defined(name) for name in names}
        found.update(each.canonical_path for each in defined.values())
        links = {name: f"[`{name.rpartition('.')[2]}`][{each.canonical_path}]" for name, each in defined.items()}
        imports = " and ".join(f"`{package}`" for package in entry["names"])
        rows = [f"| {links[name]} | {_sentence(each)} |" for name, each in defined.items()]
        overview.append(f"| [{entry['title']}]({file}.md) | {', '.join(links.values())} |")
        parts = [
            f"# {entry['title']}",
            f"Import from {imports}.",
            "\n".join(["| name | purpose |", "| --- | --- |", *rows]),
        ]
        for name, each in defined.items():
            listed = "\n    options: {summary: {functions: true}}" if name.rpartition(".")[2] in LISTED else ""
            parts.append(f"::: {each.canonical_path if '.lab.' in name else name}{listed}")
        yield file, "\n\n".join(parts) + "\n"
    if wrong := found - Counter(_public()) | (Counter(_public()) - found):
        raise ValueError(f"docs/reference.yaml must have each public name once; see {', '.join(sorted(wrong))}")
    about = "All public names, by topic. [Public API and releases](../releasing.md) has the rules for changes."
    yield "index", "\n\n".join(["# Reference", about, "\n".join(overview)]) + "\n"


def _sentence(defined: griffe.Object | griffe.Alias) -> str:
    """Return the first paragraph of a docstring, for a cell of a table."""
    text = "" if defined.docstring is None else defined.docstring.value.partition("\n\n")[0]
    return _markdown(" ".join(text.split())).replace("|", r"\|")
