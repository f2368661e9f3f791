"""Count hard constructions in the pages, and fail if a page has more than its limit.

    python .ci/prose.py                  # each page with its count; exit status 1 if one is above its limit
    python .ci/prose.py --show           # each sentence that a construction matches, too
    python .ci/prose.py docs/data.md     # only these pages

``.ci/prose.yaml`` has the constructions, with examples and better versions, and the limits. A hit is a place to look.
A page without hits may still be hard to read.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
RULES = ROOT / ".ci" / "prose.yaml"


def pages() -> list[Path]:
    """Return the pages that are checked; those in ``docs/papers`` are generated."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without its code, tables, headings, pictures and formulas."""
    text = re.sub(r"^<!-- (\S+):start -->.*?^<!-- \1:end -->", "", text, flags=re.M | re.S)  # which a benchmark writes
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


def hits(text: str, rules: dict[str, Any]) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of sentences of a page, and each match: the construction's name and the sentence."""
    found, count = [], 0
    for sentence in sentences(text):
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
    for page in [path.resolve() for path in options.pages] or pages():
        name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else str(page)
        count, found = hits(page.read_text(), rules)
        limit = settings["pages"].get(name, max(1, int(settings["limit"] * count / 100)))
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
