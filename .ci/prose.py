"""Count hard constructions in pages, docstrings, comments and messages, and fail above the limits.

    python .ci/prose.py                  # each page, and the package's texts by kind; exit status 1 above a limit
    python .ci/prose.py --show           # each sentence that a construction matches, too
    python .ci/prose.py docs/data.md     # only these pages

Messages are the texts of errors, warnings, log lines and prints in the code. ``.ci/prose.yaml`` has the constructions,
with examples and better versions, and the limits. A hit is a place to look. A page without hits may still be hard to
read.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
RULES = ROOT / ".ci" / "prose.yaml"


def pages() -> list[Path]:
    """Return the pages to check. Those in ``docs/papers`` are generated and not checked."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without its code, tables, headings, pictures and formulas."""
    text = re.sub(r"^<!-- (\S+):start -->.*?^<!-- \1:end -->", "", text, flags=re.M | re.S)  # a benchmark writes them
    text = re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^(?:    (?! *[-*\d]).*|\|.*|#.*|!\[.*)$", "", text, flags=re.M)
    text = re.sub(r"^ *(?:[-*]|\d+\.) +", "\n\n", text, flags=re.M)
    text = re.sub(r"`[^`]+`", "CODE", re.sub(r"\$[^$]+\$", "FORMULA", text))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\b(e\.g|i\.e|et al|vs|cf)\.", r"\1", text)
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9\"(*])", " ".join(paragraph.split())):
            if len(sentence.split()) > 2:
                yield sentence


def text_of(node: ast.expr) -> str:
    """Return the text of a string expression, with each inserted value as CODE."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "CODE"


def messages(code: str) -> Iterator[str]:
    """Yield the texts of a module's errors, warnings, log lines and prints."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            if name.endswith("Error") or "warn" in name or owner == "_log" or name in ("rank_zero_info", "print"):
                yield text_of(node.args[0])


def docstrings(code: str) -> Iterator[str]:
    """Yield the docstrings of a module."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield (ast.get_docstring(node) or "").replace("``", "`")


def comments(code: str) -> Iterator[str]:
    """Yield the comments of a module. Consecutive comment lines are one comment."""
    block: list[str] = []
    end = 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            if line != end + 1 or token.line[:column].strip():
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            end = line
    yield " ".join(block)


def hits(texts: Iterable[str], rules: dict[str, Any]) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of sentences of some texts, and each match: the construction's name and the sentence."""
    found, count = [], 0
    for sentence in (sentence for text in texts for sentence in sentences(text)):
        count += 1
        found += [(name, sentence) for name, rule in rules.items() if re.search(rule["find"], sentence)]
    return count, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args(arguments)
    settings = yaml.safe_load(RULES.read_text())
    rules, above = settings["constructions"], []
    chosen = [path.resolve() for path in options.pages]
    texts: dict[str, tuple[list[str], float]] = {}
    for page in chosen or pages():
        name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else str(page)
        texts[name] = [page.read_text()], settings["limit"]
    if not chosen:
        code = sorted((ROOT / "lightning_fed").rglob("*.py"))
        for of in (docstrings, comments, messages):
            found = [text for path in code for text in of(path.read_text())]
            texts[of.__name__] = found, settings[of.__name__]
    for name, (parts, share) in texts.items():
        count, found = hits(parts, rules)
        limit = settings["pages"].get(name, max(1, int(share * count / 100)))
        print(f"{name:34} {count:4} sentences {len(found):3} hits, limit {limit}")
        if len(found) > limit:
            above.append(name)
        if options.show or len(found) > limit:
            for construction, sentence in found:
                print(f"    {construction}: {sentence}\n        {rules[construction]['why']}")
        if name in settings["pages"] and len(found) < limit:
            print(f"    lower its limit to {len(found)} in {RULES.relative_to(ROOT)}")
    if above:
        print(f"above the limit: {', '.join(above)}", file=sys.stderr)
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
