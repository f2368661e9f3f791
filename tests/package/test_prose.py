"""The script that counts hard constructions in the pages, and its list of them."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

SCRIPT = Path(__file__).parents[2] / ".ci" / "prose.py"
if not SCRIPT.exists():
    pytest.skip("outside a checkout there is no .ci/prose.py", allow_module_level=True)
SETTINGS = yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
RULES: dict[str, Any] = SETTINGS["constructions"]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(text: str) -> list[str]:
    return [name for name, _ in load().hits([text], RULES)[1]]


@pytest.mark.parametrize("name", RULES)
def test_construction_is_found_only_in_its_bad_examples(name: str) -> None:
    for example, better in RULES[name]["examples"].items():
        assert name in names(example), example
        assert names(better) == [], better


def test_long_sentence_is_found() -> None:
    assert names(" ".join(["word"] * 45) + ".") == []
    assert names(" ".join(["word"] * 46) + ".") == ["long-sentence"]


def test_code_tables_headings_and_generated_parts_are_ignored() -> None:
    page = (
        "# What is read\n\n```python\n# What is read\n```\n\n| What is read |\n\n    what is read, what is sent\n\n"
        "<!-- figures:start -->\nWhat is read.\n<!-- figures:end -->\n\nRead `what is sent, what is read` twice.\n"
    )
    assert names(page) == []


def test_list_items_are_separate_sentences() -> None:
    count, found = load().hits(["- Take a mean.\n- What is sent is a sum\n- Take a median\n"], RULES)
    assert (count, [name for name, _ in found]) == (3, ["what-clause"])


def test_page_above_its_limit_fails_with_the_sentence_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, page = load(), tmp_path / "page.md"
    page.write_text("What is sent is a sum.\n")
    assert script.main([str(page)]) == 0  # one is allowed
    page.write_text("What is sent is a sum. It starts anew every time.\n")
    assert script.main([str(page)]) == 1
    shown = capsys.readouterr()
    assert "old-word: It starts anew every time." in shown.out
    assert RULES["old-word"]["why"] in shown.out
    assert "above the limit" in shown.err


def test_limits_refer_to_existing_pages() -> None:
    script = load()
    assert set(SETTINGS["pages"]) <= {path.relative_to(script.ROOT).as_posix() for path in script.pages()}


def test_every_construction_has_a_reason_and_a_valid_regex() -> None:
    for name, rule in RULES.items():
        assert rule["why"], name
        re.compile(rule["find"])


def test_messages_are_texts_of_errors_warnings_log_lines_and_prints() -> None:
    code = (
        "raise FederatedError(f'{path} is no folder.' + ' Correct the path.')\n"
        "warnings.warn('It starts anew every time.', stacklevel=2)\n_log.info('What is sent is a sum.')\n"
        "print('A sum is sent.')\nraise error\nf('What is read here is no message.')\n"
    )
    count, found = load().hits(load().messages(code), RULES)
    assert (count, [name for name, _ in found]) == (5, ["negated-noun", "old-word", "what-clause"])


def test_docstrings_include_modules_classes_and_functions() -> None:
    code = 'class A:\n    """It starts anew."""\n    def f(self):\n        """A ``what``."""\n'
    assert list(load().docstrings(f'"""A sum."""\n{code}')) == ["A sum.", "It starts anew.", "A `what`."]


def test_comments_on_consecutive_lines_are_joined() -> None:
    code = "# What is sent\n# is a sum.\nx = 1  # It starts anew.\ny = '# no comment'  # A mean.\n\n# A sum.\n"
    found = [text for text in load().comments(code) if text]
    assert found == ["What is sent is a sum.", "It starts anew.", "A mean.", "A sum."]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["docstrings", "comments", "messages"])
def test_package_texts_above_their_limit_fail(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load()
    monkeypatch.setattr(script, "pages", list)
    assert script.main([]) == 0

    def texts(code: str) -> list[str]:
        return ["What is sent is a sum."]

    texts.__name__ = kind
    monkeypatch.setattr(script, kind, texts)
    assert script.main([]) == 1
    assert f"above the limit: {kind}" in capsys.readouterr().err
