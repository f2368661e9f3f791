"""Record-level privacy on a site: the secret of its noise, and the account of its clients' spent budget."""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_fed.core.arguments import check_number
from lightning_fed.core.disk import flush_folder
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.message import Message, digest
from lightning_fed.deploy.site_states import append_private, write_private
from lightning_fed.server.privacy import ClientPrivacy, epsilon_of

_BYTES = 32  # length of the secret and of digests


def check_budget(max_epsilon: Any, delta: Any, privacy: ClientPrivacy | None) -> None:
    """Raise if a privacy budget is invalid, or if the trainer has no ``client_privacy``."""
    for name, value, interval in (("max_epsilon", max_epsilon, "(0, inf)"), ("delta", delta, "(0, 1)")):
        if value is None:
            continue
        check_number("FederatedSite", name, value, interval)
        if privacy is None:
            raise FederatedError(
                f"FederatedSite({name}={value!r}): the trainer has no client_privacy, so nothing would bound what"
                " answers reveal of an example. Set client_privacy=ClientPrivacy(...) for the server and all sites."
            )


class SitePrivacy:
    """The randomness of a site's answers, and the privacy of its examples that they spend.

    The site's secret and the task's digest determine its noise and batches. So the same task has the same answer, and
    any other task has independent noise. Every distinct task that was answered counts, in all runs of the folder. A
    task whose answer would differ from the first one is refused, since both have the same noise. No other site uses
    the folder of the secret and the account.
    """

    def __init__(
        self, folder: Path, privacy: ClientPrivacy, max_epsilon: float | None = None, delta: float | None = None
    ) -> None:
        self.privacy, self.max_epsilon = privacy, max_epsilon
        self.delta = privacy.delta if delta is None else delta
        self._secret, self._account = folder / "secret", folder / "answers.jsonl"
        # the digest of the reply and its costs, by client and digest of the task
        self._answers: dict[tuple[ClientId, str], tuple[str, Counter[tuple[float, int]]]] = {}
        self._spent: dict[ClientId, Counter[tuple[float, int]]] = {}
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)  # regardless of the umask
            flush_folder(folder.parent)
            self._load()
            self._key = _secret_in(self._secret)
        except OSError as error:
            raise FederatedError(f"The site's folder {folder} cannot be used: {error.strerror or error}.") from error

    def seed(self, task: Message) -> int:
        """Return the seed of all randomness of the answer to a task."""
        return seed_of(self._key, digest_of(task))

    def epsilon(self, client: ClientId, more: Counter[tuple[float, int]] | None = None) -> float:
        """Return the epsilon of a client in all runs so far, including ``more`` noisy sums."""
        return epsilon_of(self._spent.get(client, Counter()) + (more or Counter()), self.delta)

    def answer(self, task: Message, batches: int, steps: int, per_epoch: int, work: Callable[[], Message]) -> Message:
        """Return the answer of ``work``, which counts before it leaves the site, even if the work fails.

        Raise if the client would spend more than its budget, or if the answer is not the one given before. The cost
        depends on the client's ``batches`` in an epoch, the requested local ``steps``, and the most steps in an epoch.
        """
        client, key = task.client, digest_of(task)
        first, paid = self._answers.get((client, key), ("", Counter()))
        costs = Counter[tuple[float, int]]()
        if not first:  # a failed try may have paid for other data: pay the difference
            of_one, count = self.privacy.sums(batches, steps, per_epoch)
            costs = Counter({(self.privacy.noise_multiplier, of_one): count}) - paid
            would = self.epsilon(client, costs)
            if self.max_epsilon is not None and would > self.max_epsilon:
                raise FederatedError(
                    f"Client {client!r} would spend epsilon {would:.4g} at delta {self.delta:g} in all with this task,"
                    f" and its site has max_epsilon={self.max_epsilon:g}. It answers no more such tasks."
                )
        reply = None
        try:
            reply = work()
        finally:
            found = "" if reply is None or "failed" in reply.header else digest_of(reply)
            if not first:
                sums = [[*kind, count] for kind, count in costs.items()]
                line = json.dumps({"client": client, "task": key, "answer": found, "sums": sums})
                append_private(self._account, f"{line}\n".encode())
                self._count(client, key, found, costs)
        if first and found != first:
            raise FederatedError(
                f"The site of client {client!r} has answered this task before, and computes another answer now. Both"
                " have the same noise, so their difference would reveal data. Its data, settings, device or number of"
                " threads have changed: undo that, or start a new run."
            )
        return reply

    def _count(self, client: ClientId, key: str, answer: str, costs: Counter[tuple[float, int]]) -> None:
        _, paid = self._answers.get((client, key), ("", Counter()))
        self._answers[client, key] = answer, paid + costs
        self._spent.setdefault(client, Counter()).update(costs)

    def _load(self) -> None:
        if not self._account.is_file():
            if self._secret.is_file():  # the secret is made after the account
                raise FederatedError(
                    f"{self._account} is missing. It holds what the site's clients have spent of their privacy. Restore"
                    " it."
                )
            write_private(self._account, b"")
        content = self._account.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # a power cut came before this answer left the site
            write_private(self._account, whole)
        try:
            for line in map(json.loads, whole.splitlines()):
                sums = Counter({(float(z), int(batches)): int(count) for z, batches, count in line["sums"]})
                self._count(line["client"], line["task"], line["answer"], sums)
        except (ValueError, KeyError, TypeError) as error:
            raise FederatedError(
                f"{self._account} is damaged: {error}. It holds what the site's clients have spent of their privacy."
                " Restore it."
            ) from error


def _secret_in(path: Path) -> bytes:
    """Return the secret in a file; let the operating system make one if there is none."""
    if not path.is_file():
        write_private(path, secrets.token_bytes(_BYTES))
    path.chmod(0o600)
    if len(secret := path.read_bytes()) != _BYTES:
        raise FederatedError(f"{path} is damaged: it has {len(secret)} bytes, and a secret has {_BYTES}. Restore it.")
    return secret


def seed_of(secret: bytes, task: str) -> int:
    """Return the seed for a task's digest; without the secret, it is indistinguishable from a random number."""
    return int.from_bytes(hashlib.blake2b(task.encode(), key=secret, digest_size=_BYTES).digest(), "little")


def digest_of(message: Message) -> str:
    """Return a digest of a message, without its round's attempt and the run's fits."""
    header = {name: value for name, value in message.header.items() if name not in ("attempt", "fit", "of")}
    tensors = {name: digest(value) for name, value in message.tensors.items()}
    whole = json.dumps([header, tensors], sort_keys=True).encode()
    return hashlib.blake2b(whole, digest_size=_BYTES).hexdigest()
