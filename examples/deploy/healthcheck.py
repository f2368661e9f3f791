"""Check whether a SuperLink or a SuperNode runs: `python healthcheck.py URL [ca.crt]` exits with 0 or 1."""

import ssl
import sys
import urllib.request


def is_healthy(url: str, authority: str | None = None) -> bool:
    """Return whether a URL answers.

    Args:
        url: ``https://HOST:8000/health`` of a SuperLink, ``http://127.0.0.1:9094/health`` of a SuperNode.
        authority: The file with the certificate of the authority that signed the SuperLink's certificate.
    """
    context = ssl.create_default_context(cafile=authority) if url.startswith("https") else None
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:  # noqa: S310  # the caller's URL
            return bool(answer.status == 200)
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return False


if __name__ == "__main__":
    sys.exit(not is_healthy(*sys.argv[1:]))
