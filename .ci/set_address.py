"""Set the repository's address in every file that needs it, or replace the existing one.

    python .ci/set_address.py https://github.com/OWNER/NAME
    python .ci/set_address.py https://github.com/OWNER/NAME --check   # change nothing; fail if a file lacks the address

The site's address follows from it: https://OWNER.github.io/NAME/.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

# By file: the text to replace, with or without an address, and the text with one
PLACES = {
    "mkdocs.yml": (r"^repo_url: .*\nsite_url: .*\n", "repo_url: &repository {address}\nsite_url: {site}\n"),
    "pyproject.toml": (
        r"^# \[project\.urls\].*\n|^\[project\.urls\]\n(?:.+\n)*",
        '[project.urls]\nRepository = "{address}"\nDocumentation = "{site}"\n'
        'Changelog = "{address}/blob/main/CHANGELOG.md"\nIssues = "{address}/issues"\n',
    ),
    "CITATION.cff": (
        r"^(license: .*\n)(repository-code: .*\nurl: .*\n)?",
        r"\1repository-code: {address}\nurl: {site}\n",
    ),
    "README.md": (r"git clone \S+ lightning_fed", "git clone {address} lightning_fed"),
    "SECURITY.md": (
        r'"Report a vulnerability"|\[Report a vulnerability\]\(\S+\)',
        "[Report a vulnerability]({address}/security/advisories/new)",
    ),
    "CODE_OF_CONDUCT.md": (r"Security tab|\[Security tab\]\(\S+\)", "[Security tab]({address}/security)"),
    ".github/ISSUE_TEMPLATE/config.yml": (
        r"(?:^contact_links:\n(?: .*\n)*)?\Z",
        "contact_links:\n  - name: A vulnerability\n    url: {address}/security/advisories/new\n"
        "    about: Report it privately.\n",
    ),
}


def with_address(name: str, text: str, address: str) -> str:
    """Return the text of a file with the repository's address."""
    pattern, new = PLACES[name]
    owner, repository = address.split("/")[-2:]
    new = new.format(address=address, site=f"https://{owner.lower()}.github.io/{repository}/")
    changed, count = re.subn(pattern, new, text, count=1, flags=re.M)
    if not count:
        raise SystemExit(f"{name} has no place for the address: its pattern in .ci/set_address.py matches nothing.")
    return changed


def main(arguments: Sequence[str] | None = None) -> None:
    """Set or check the address."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="of the repository, such as https://github.com/OWNER/NAME")
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a file lacks the address")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of the files")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"https://github\.com/[A-Za-z0-9-]+/[\w.-]+(?<!\.git)", given.address, flags=re.A):
        raise SystemExit(
            f"The address is {given.address!r}. Expected https://github.com/OWNER/NAME, without an ending."
        )
    old = {name: (given.root / name).read_text() for name in PLACES}
    new = {name: with_address(name, text, given.address) for name, text in old.items()}
    changed = [name for name in PLACES if new[name] != old[name]]
    if given.check and changed:
        raise SystemExit(
            f"{', '.join(changed)}: the repository's address is missing or another one. Run `python .ci/set_address.py"
            f" {given.address}`, and commit the changes before you tag the release."
        )
    for name in changed:
        (given.root / name).write_text(new[name])
        print(name)


if __name__ == "__main__":
    main()
