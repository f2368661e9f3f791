"""The 25 configurations of the default run: some resemble past failures, the others cover the axes."""

from functools import partial

from tests.fuzz import plain_loop
from tests.fuzz.configuration import FULL_GRADIENTS, Configuration, covering

__all__ = ["DEFAULT"]


def _is_vectorized(c: Configuration) -> bool:
    """Return whether the vectorized engine supports a configuration, as far as this is known before a run."""
    has_kept_buffers = c.buffers == "local" and (c.buffer != "none" or c.loss == "weighted")
    return (
        c.network in ("linear", "mlp", "conv", "attention", "wide")
        and not c.buffer.startswith("batch")
        and not c.buffer.endswith("add_")
        and not has_kept_buffers
        and c.output != "skip"
        and (c.local_state, c.accumulate, c.fails, c.mended) == ("reset", 1, False, True)
    )


def _is_alike(c: Configuration) -> bool:
    """Return whether no client has its own settings."""
    return c.attribute not in ("one", "distinct") and c.client_lr == "none"


def _sets_one_client(c: Configuration, chunk: int | None) -> bool:
    """Return whether only one client has other settings, with chunks of the given size (None: the default)."""
    is_one = "one" in (c.attribute, c.client_lr) and "distinct" not in (c.attribute, c.client_lr)
    return (
        is_one
        and c.clients is None
        and c.method not in FULL_GRADIENTS
        and _is_vectorized(c)
        and c.chunk == chunk
        and c.network != "wide"
    )


def _logs_sizes(c: Configuration, is_wide: bool) -> bool:
    """Return whether batches of different sizes are logged with their sizes, one client at a time."""
    is_single = c.network == "wide" if is_wide else c.chunk == 1 and c.limit == 1.0 and c.heterogeneity != "deadline"
    sizes_differ = c.sizes in ((7, 5, 10, 4), (1, 8, 3, 5), (5, 2, 11)) and c.batch >= 4 and not c.drop_last
    with_sizes = c.log in ("batch_size", "several", "dict", "tokens") and c.buffer == "none"
    is_whole = c.clients is None and c.work != "1 step" and c.method != "ServerOnly"
    return is_single and with_sizes and sizes_differ and is_whole and _is_vectorized(c) and _is_alike(c)


def _assigns_buffer(c: Configuration, kind: str) -> bool:
    """Return whether the module assigns a buffer that does not depend on the batch, and the buffer affects the run."""
    is_seen = c.buffers == "average" or c.buffer_read
    return c.buffer == f"{kind} set" and is_seen and c.method != "ServerOnly" and _is_vectorized(c) and _is_alike(c)


def _is_plain(c: Configuration, method: str) -> bool:
    return c.method == method and plain_loop.applies(c) and _is_alike(c) and c.output != "skip"


DEFAULT = covering(
    25,
    [
        *(partial(_sets_one_client, chunk=chunk) for chunk in (None, 1)),
        *(partial(_logs_sizes, is_wide=is_wide) for is_wide in (False, True)),
        *(partial(_assigns_buffer, kind=kind) for kind in ("int", "float", "inner")),
        *(partial(_is_plain, method=method) for method in ("FedAvg", "FedProx", "Scaffold", "FedCM", "Mime")),
        lambda c: c.resume_after > 0 and c.local_state == "keep" and _is_alike(c) and c.network != "sparse",
        lambda c: c.processes == 2 and c.asynchronous == "none" and c.network != "sparse",
    ],
)
"""Their numbers."""
