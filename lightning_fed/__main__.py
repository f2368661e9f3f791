"""The command ``lightning-fed``, and ``python -m lightning_fed``."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; for ``reproduce``, print a line before loading PyTorch, which takes seconds."""
    if sys.argv[1:2] == ["reproduce"]:
        if "--list" in sys.argv:
            from lightning_fed.lab.catalogue import listing

            print(listing())
            return
        print("lightning-fed reproduce: loading PyTorch and Lightning ...", file=sys.stderr, flush=True)
    from lightning_fed.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
