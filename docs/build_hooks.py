"""What MkDocs does beside its plugins: pages made of other files, links out of the folder, formulas, docstrings.

``mkdocs build --strict`` runs it; the pages themselves read as well where they lie, in the repository.
"""

import ast
import re
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree import ElementTree

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PACKAGES = [path for path in sorted((ROOT / "lightning_fed").rglob("__init__.py")) if "__all__" in path.read_text()]
_SHOWN = {".py": "python", ".yaml": "yaml"}
REUSED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files elsewhere: the changelog, the examples, the reference."""
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        files.append(File.generated(config, REUSED[name], content=(ROOT / name).read_text()))
    files.append(File.generated(config, "examples.md", content=_examples()))
    for path in PACKAGES:
        files.append(File.generated(config, f"api/{path.parent.name}.md", content=_reference(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to their pages here; where there is none, show the path."""
    made_of = {"changelog.md": ROOT, "contributing.md": ROOT, "examples.md": ROOT / "examples"}
    folder = made_of.get(page.file.src_uri, (ROOT / "docs" / page.file.src_uri).parent)

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
        else:
            return text if text.startswith("`") else f"{text} (`{inside}`)"
        up = "../" * page.file.src_uri.count("/")
        return f"[{text}]({up}{here}{'#' if fragment else ''}{fragment})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    return "".join(
        part if part.startswith("```") else re.sub(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)", redirected, part)
        for part in parts
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML, which browsers show by themselves."""
    inline = r'<span class="arithmatex">\\\((.*?)\\\)</span>'
    block = r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>'
    html = re.sub(inline, lambda m: _mathml(m[1], "inline"), html, flags=re.S)
    return re.sub(block, lambda m: _mathml(m[1], "block"), html, flags=re.S)


class Docstrings(griffe.Extension):
    """Let docstrings, which are written for Python's own ``help``, be Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value)


def _markdown(text: str) -> str:
    """Return reStructuredText as Markdown: formulas, tables, roles, literals, blocks after a double colon."""
    text = re.sub(r"^( *)\.\. math::(.*\n(?:\1 {4}.*\n|\s*\n)*)", _fenced, f"{text}\n", flags=re.M)
    text = re.sub(r"^(=+(?: +=+)+)\n(.*\n)\1\n((?:.*\n)+?)\1$", _table, text, flags=re.M)
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r":(?:class|func|meth|attr|data|mod):`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`\n]+)``", r"`\1`", text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.M)  # where doctests are code
    return re.sub(r"::(\n\n +)", r":\1", text).rstrip()


def _fenced(directive: re.Match[str]) -> str:
    return f"```math\n{dedent(directive[2]).strip()}\n```\n\n"


def _table(table: re.Match[str]) -> str:
    starts = [column.start() for column in re.finditer("=+", table[1])]
    cuts = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    head, *rows = ([line[cut].strip() for cut in cuts] for line in (table[2] + table[3]).splitlines())
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def _mathml(formula: str, display: str) -> str:
    """Return a formula as MathML; what cannot be read ends the build."""
    formula = formula.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    for latex, same in (("{aligned}", "{split}"), (r"\lvert", r"\left|"), (r"\rvert", r"\right|")):
        formula = formula.replace(latex, same)
    formula = formula.replace(r"\lVert", r"\left\|").replace(r"\rVert", r"\right\|")
    if "&" in formula and r"\begin" not in formula:  # as Sphinx has it, aligned without saying so
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
    """Return the index of the examples, and below it each file as it is."""
    parts = [(ROOT / "examples" / "README.md").read_text()]
    for path in sorted(p for p in (ROOT / "examples").rglob("*") if p.suffix in _SHOWN):
        name = path.relative_to(ROOT / "examples").as_posix()
        heading = name.replace("__", r"\_\_")  # which would be bold
        parts.append(f"## {heading}\n\n```{_SHOWN[path.suffix]}\n{path.read_text()}```\n")
    return "\n".join(parts)


def _reference(path: Path) -> str:
    """Return the page of a package: every name that it makes public."""
    package = ".".join(path.parent.relative_to(ROOT).parts)
    tree = ast.parse(path.read_text())
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    names = [name for name in ast.literal_eval(lists[0]) if not name.startswith("__")]
    about = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    # a name that a module of the package has too is looked up where it is defined
    homes = {name: f"{package}.{name}" if (path.parent / f"{name}.py").exists() else package for name in names}
    return "\n\n".join([f"# {package}", about, *(f"::: {home}.{name}" for name, home in homes.items())]) + "\n"
