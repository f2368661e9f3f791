"""Record-level privacy on sites: noise from a secret that stays there, and an account that the site keeps itself."""

import json
import logging
import secrets
import signal
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import ClientAccuracy
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import KeyedStream, Purpose, generator
from lightning_fed.data.batches.batches import PoissonBatches
from lightning_fed.deploy import FederatedSite, Message, site_privacy
from lightning_fed.deploy.site_privacy import SitePrivacy, digest_of, seed_of
from lightning_fed.server import ClientPrivacy, SignFlipAttack, TopK
from lightning_fed.server.privacy import gaussian_noise
from tests.deploy.site_models import Net, model
from tests.deploy.wire import SIZES, EndedError, Wire, make_data, make_trainer, parameters, simulated
from tests.helpers.optional import needs_opacus
from tests.helpers.training import CLASSES, FEATURES, clients

pytestmark = needs_opacus

ON = ClientPrivacy(0.8, 0.3, 1e-3)
MAKE = partial(make_trainer, "FedAvg", client_privacy=ON, max_rounds=2)
REPEATED = {"format", "run", "round", "client"}  # replies repeat these from their tasks


class Plain(pl.LightningModule):
    """A network without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x.to(self.dtype)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.01)


class Broken(Net):
    """Fails on every batch, with its examples in the error message."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ValueError(f"the patient {batch[0].tolist()}")


def plain(kind: Callable[[], Any] = Plain) -> Any:
    torch.manual_seed(0)
    return kind()


def train_tasks(wire: Wire, **fit: Any) -> tuple[list[Message], list[Message]]:
    """Run over sites, and return the tasks of local work and the replies, in order."""
    tasks, replies = [], []

    def comes(task: Message) -> list[Message]:
        reply = wire.answer(task)
        if task.header["phase"] == "train":
            tasks.append(task)
            replies.append(reply)
        return [reply]

    wire.comes = comes  # type: ignore[assignment]
    wire.run(**fit)
    return tasks, replies


@pytest.mark.parametrize("sampling", ["poisson", pytest.param("shuffle", marks=pytest.mark.thorough)])
def test_noise_and_batches_match_a_loop_with_the_site_secrets(sampling: Any, tmp_path: Path) -> None:
    privacy = ClientPrivacy(0.8, 0.3, 1e-3, sampling)
    make = partial(MAKE, client_privacy=privacy, clients_per_round=4, precision="64-true", server_optimizer=None)
    wire, module = Wire(tmp_path, make, plain), plain()
    tasks, _ = train_tasks(wire, module=module)
    assert len(tasks) == 2 * len(SIZES)
    hand, source = plain().double(), make_data()
    params = list(hand.parameters())
    x = [p.detach().clone() for p in params]
    for number in range(2):
        total = [torch.zeros_like(p) for p in x]
        for task in (task for task in tasks if task.header["round"] == number):
            i = int(task.client)
            seed = seed_of((tmp_path / str(i) / "privacy" / "secret").read_bytes(), digest_of(task))
            batches: Any = source.client_batches(i)
            batches = PoissonBatches(batches, seed, number, i) if sampling == "poisson" else batches
            noise = KeyedStream(seed, Purpose.CLIENT_NOISE, number, i)
            stream = generator(seed, Purpose.BATCHES, number, i)
            with torch.no_grad():
                for p, value in zip(params, x, strict=True):
                    p.copy_(value)
            for batch, examples in (batch for _ in range(2) for batch in batches.epoch(stream)):
                sums = [torch.zeros_like(p) for p in x]
                for j in range(examples):
                    grads = torch.autograd.grad(hand.training_step([part[j : j + 1] for part in batch], 0), params)
                    norm = float(torch.cat([g.flatten() for g in grads]).norm())
                    for own, g in zip(sums, grads, strict=True):
                        own += g / max(1.0, norm / 0.3)
                divisor = examples if sampling == "shuffle" else batches.size / batches.num_batches()
                with torch.no_grad():
                    for p, own in zip(params, sums, strict=True):
                        own += gaussian_noise(own.numel(), 0.24, noise).view(own.shape)
                        p -= 0.1 * (own / divisor + 0.01 * p)
            for own, p in zip(total, params, strict=True):
                own += SIZES[i] / sum(SIZES) * p.detach()
        x = total
    torch.testing.assert_close(parameters(module), torch.cat([p.flatten() for p in x]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param(
            "FedAvg", {"client_privacy": ClientPrivacy(0.0, 1e9, 1e-3, "shuffle")}, marks=pytest.mark.thorough
        ),
        ("Scaffold ii", {"compression": TopK(0.5), "attack": SignFlipAttack(0.5)}),
        pytest.param("FedAvg", {"local_optimizer_state": "keep", "personal": ["net.3.*"]}, marks=pytest.mark.thorough),
        pytest.param("FedDyn", {"limit_train_batches": 2}, marks=pytest.mark.thorough),
        pytest.param("FedCM", {"client_privacy": ClientPrivacy(0.8, 0.3, 1e-3, "shuffle")}, marks=pytest.mark.thorough),
    ],
)
def test_run_seed_as_secret_matches_simulation_bits_and_epsilons(
    method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(make_trainer, method, **{"client_privacy": ON, "max_rounds": 3, **options})
    expected, wire, module = simulated(make), Wire(tmp_path, make), model()
    with monkeypatch.context() as patched:
        patched.setattr(site_privacy, "seed_of", lambda secret, task: 0)
        fitted, _ = wire.run(module)
    assert torch.equal(parameters(module), parameters(expected.lightning_module))
    spent = fitted.fit_loop.client_epsilons
    assert spent == expected.fit_loop.client_epsilons
    for client, site in wire.sites.items():
        assert site._privacy is not None
        assert site._privacy.epsilon(client) == spent.get(client, 0.0)


def test_only_messages_leave_and_repeating_them_requires_the_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_fed.deploy.site")
    wire = Wire(tmp_path, MAKE)
    tasks, replies = train_tasks(wire)
    for task, reply in zip(tasks, replies, strict=True):
        header = {name: value for name, value in reply.header.items() if name not in REPEATED}
        size = SIZES[int(reply.client)]
        report = {"steps": 2 * -(-size // 4), "loss": pytest.approx(float("nan"), nan_ok=True)}
        norm = float((reply.tensors["model"] - task.tensors["x"]).norm())
        assert header.pop("report") == {**report, "update_norm": pytest.approx(norm), "seconds": 0.0}
        assert header == {
            "phase": "train", "attempt": 0, "norms": {}, "metrics": {}, "examples": 2 * size, "own_examples": 0,
            "loss": 0.0, "loss_examples": 0, "implied": [], "same": {}, "message_bytes": None, "server_read": [],
            "cohort_grad_read": [],
        }  # fmt: skip
    assert "spent in all" in caplog.text
    task, folder = tasks[0], tmp_path / str(tasks[0].client) / "privacy"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    first = wire.answer(task)
    wire.kill()
    assert torch.equal(wire.answer(task).tensors["model"], first.tensors["model"]), "a restarted site"
    for other in ("other", "another"):
        there = Wire(tmp_path / other, MAKE)
        there.answer(registration_of(wire, task))
        assert not torch.allclose(there.answer(task).tensors["model"], first.tensors["model"], atol=1e-3)
    with pytest.raises(FederatedError, match="this site runs client_privacy"):
        wire.answer(replace(task, header={**task.header, "phase": "measure", "what": "loss"}))


def registration_of(wire: Wire, task: Message) -> Message:
    """Return the registration for the run of a task."""
    site = wire.site(int(task.client))
    header = {name: task.header[name] for name in ("format", "run", "client")}
    facts = {"facts": {**site._facts, **site._clients.optimizer_facts}}  # type: ignore[union-attr]
    return Message(
        {**header, **facts, "phase": "register", "round": 0, "attempt": 0, "clients": list(range(len(SIZES)))}
    )


def test_only_distinct_tasks_get_new_noise_and_spend_epsilon(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(MAKE, max_rounds=1))
    tasks, (reply, *_) = train_tasks(wire)
    task, client = tasks[0], int(tasks[0].client)
    spent: Any = lambda: wire.site(client)._privacy.epsilon(client)  # noqa: E731
    once = spent()
    wire.answer(replace(task, header={**task.header, "attempt": 7}))
    assert spent() == once, "the attempt changes nothing in the answer"
    other = replace(task, tensors={"x": task.tensors["x"] + 1e-6})
    moved = wire.answer(other)
    twice = spent()
    assert twice > once
    noise = (reply.tensors["model"] - moved.tensors["model"]).norm()
    assert noise > 0.5 * (reply.tensors["model"] - task.tensors["x"]).norm(), "the noise of two answers would cancel"
    wire.answer(replace(task, header={**task.header, "steps": 1}))
    thrice = spent()
    assert thrice > twice
    wire.kill()
    assert spent() == thrice, "the account is on the disk"
    for same, answer in ((other, moved), (task, reply)):  # in another order: the batches also depend on the task
        assert torch.equal(wire.answer(same).tensors["model"], answer.tensors["model"])
    assert spent() == thrice
    steps = task.header["steps"]
    assert thrice == pytest.approx(ON.epsilon({-(-SIZES[client] // 4): 2 * steps + 1}))


def test_site_does_not_answer_beyond_its_privacy_budget(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(MAKE, max_rounds=1))
    tasks, _ = train_tasks(wire)
    task, client = tasks[0], int(tasks[0].client)
    site = wire.site(client)
    one = site._privacy.epsilon(client)  # type: ignore[union-attr]
    other = replace(task, tensors={"x": task.tensors["x"] + 1.0})
    registration = registration_of(wire, task)
    wire.kill()
    given = make_trainer("FedAvg", client_privacy=ON), model(), make_data([client]), client, tmp_path / str(client)
    with FederatedSite(*given, max_epsilon=1.1 * one) as strict:
        strict.answer(task)  # a repeated task
        for wanted in (other, replace(task, header={**task.header, "run": "0123456789abcdef"})):
            if wanted is not other:
                strict.answer(replace(registration, header={**registration.header, "run": "0123456789abcdef"}))
            with pytest.raises(FederatedError, match=r"would spend epsilon .* at delta 0.001 in all .* max_epsilon="):
                strict.answer(wanted)
        assert strict._privacy.epsilon(client) == one  # type: ignore[union-attr]
        strict.answer(replace(task, header={**task.header, "steps": 0}))  # a task without steps costs nothing
    with FederatedSite(*given, max_epsilon=1.1 * one, delta=1e-6) as stricter:  # type: ignore[misc]
        assert stricter._privacy.epsilon(client) > 1.1 * one  # type: ignore[union-attr]
    wrong = (("max_epsilon", 0.0, "inf"), ("max_epsilon", "much", "finite"), ("delta", 1.0, "finite number in"))
    for name, value, said in wrong:
        with pytest.raises(FederatedError, match=rf"FederatedSite\({name}=.*{said}"):
            FederatedSite(*given, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(FederatedError, match=r"max_epsilon=3\): the trainer has no client_privacy"):
        FederatedSite(make_trainer("FedAvg"), *given[1:], max_epsilon=3)


def test_changed_data_under_the_same_noise_are_rejected(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(MAKE, max_rounds=1))
    tasks, _ = train_tasks(wire)
    task, client = tasks[0], int(tasks[0].client)
    wire.kill()
    own = clients(SIZES)[client]
    own.tensors[0].add_(1.0)
    changed = FederatedDataModule(clients={client: own}, batch_size=4)
    with FederatedSite(wire.make(), model(), changed, client, tmp_path / str(client)) as site:
        with pytest.raises(FederatedError, match="answered this task before, and computes another answer now"):
            site.answer(task)
        site.answer(replace(task, tensors={"x": task.tensors["x"] + 1.0}))
    wire.answer(task)  # with the original data


def test_errors_do_not_reveal_examples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire(tmp_path, partial(MAKE, max_rounds=1), lambda: plain(Broken))
    with pytest.raises(FederatedError, match="has failed in its work. Its own log has the reason") as caught:
        wire.run()
    assert "patient" not in str(caught.value)
    assert "patient" in caplog.text
    spent = {client: site._privacy.epsilon(client) for client, site in wire.sites.items()}  # type: ignore[union-attr]
    assert sum(epsilon > 0 for epsilon in spent.values()) == 3, "that it failed is an answer"


def test_internal_errors_do_not_leave_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(tmp_path, partial(MAKE, max_rounds=1))
    (task, *_), _ = train_tasks(wire)
    site = wire.site(int(task.client))
    monkeypatch.setattr(site._states, "read", lambda *_: 1 / 0)
    with pytest.raises(FederatedError, match="has failed in its work. Its own log has the reason"):
        site.answer(task)


def test_batches_with_dependent_examples_get_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire(tmp_path, partial(MAKE, max_rounds=1))
    mixed = FederatedDataModule(clients={0: clients(SIZES)[0]}, batch_size=4, augment=mixup)
    wire.sites[0] = FederatedSite(wire.make(), model(), mixed, 0, tmp_path / "0")
    with pytest.raises(FederatedError, match="Client 0: The site of 0 has failed in its work"):
        wire.run()
    assert "cannot be combined with batches in which examples depend on each other" in caplog.text


def mixup(batch: Any, stream: torch.Generator) -> Any:
    x, y = batch
    return 0.7 * x + 0.3 * x.flip(0), y


def test_example_without_a_finite_gradient_is_ignored(tmp_path: Path) -> None:
    def answer(name: str, bad: bool) -> Tensor:
        own = [(x.double(), y) for x, y in clients(SIZES)[1]]
        own[3] = (own[3][0] * (float("inf") if bad else 0.0), own[3][1])
        data = FederatedDataModule(clients={1: own}, batch_size=8)
        private = ClientPrivacy(0.0, 0.3, 1e-3, "shuffle")
        make = partial(make_trainer, "FedAvg", client_privacy=private, local_epochs=1, precision="64-true")
        wire = Wire(tmp_path / name, make, lambda: plain(Zero))
        wire.sites[1] = FederatedSite(make(), plain(Zero), data, 1, tmp_path / name / "1")
        tasks, _ = train_tasks(wire, trainer=make(max_rounds=1, clients_per_round=4))
        return next(wire.answer(task).tensors["model"] for task in tasks if task.client == 1)

    torch.testing.assert_close(answer("bad", True), answer("zero", False), rtol=1e-12, atol=1e-12)


class Zero(Plain):
    """Has no gradient at an example of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(FEATURES, CLASSES, bias=False)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["FedAvg", "Scaffold ii"])
def test_killed_sites_and_servers_keep_identical_bits_and_epsilons(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = count(1)  # the digest of a task contains the run's name, but not the fit's
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0123456789abcdef" if size == 8 else f"{next(fits):08x}")
    make, found = partial(make_trainer, method, client_privacy=ON, max_rounds=3), []
    for name in ("calm", "killed"):
        for client in range(len(SIZES)):
            folder = tmp_path / name / str(client) / "privacy"
            folder.mkdir(parents=True)
            (folder / "secret").write_bytes(bytes([client]) * 32)
            (folder / "answers.jsonl").touch()
        wire, module, checkpoint = Wire(tmp_path / name, make), model(), tmp_path / f"{name}.ckpt"
        ends = [0]

        def comes(task: Message, wire: Wire = wire, name: str = name, ends: list[int] = ends) -> list[Message]:
            reply = wire.answer(task)
            if name == "killed" and task.header["phase"] == "train":
                wire.kill(int(task.client))  # after it answers: the reply is lost
                reply = wire.answer(task)
                if task.client == wire.last and task.header["round"] == 1 and not ends[0]:
                    ends[0] += 1
                    raise EndedError
            return [reply]

        wire.comes = comes  # type: ignore[assignment]
        try:
            wire.run(module, save={None: checkpoint})
        except EndedError:
            wire.kill()
            wire.run(module := model(), ckpt_path=checkpoint)
        assert ends[0] == (name == "killed")
        epsilons = [wire.site(client)._privacy.epsilon(client) for client in range(len(SIZES))]  # type: ignore[union-attr]
        found.append((parameters(module).tolist(), epsilons))
        wire.kill()
    assert found[0] == found[1]


def test_corrupt_account_or_secret_is_rejected_but_partial_line_is_not(tmp_path: Path) -> None:
    at = {"format": 1, "run": "0123456789abcdef", "phase": "train", "round": 0, "attempt": 0, "client": "a"}
    task, reply = Message({**at, "steps": 3}, {"x": torch.zeros(2)}), Message({**at, "loss": 1.0})
    first = SitePrivacy(tmp_path / "privacy", ON)
    first.answer(task, 5, 3, 5, lambda: reply)
    account, secret = tmp_path / "privacy" / "answers.jsonl", tmp_path / "privacy" / "secret"
    whole = account.read_bytes()
    assert json.loads(whole)["sums"] == [[0.8, 5, 3]]
    account.write_bytes(whole + whole[:-9])
    secret.chmod(0o644)  # a copied folder may have these modes
    secret.parent.chmod(0o755)
    again = SitePrivacy(tmp_path / "privacy", ON)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (secret, secret.parent)] == [0o600, 0o700]
    assert (again.seed(task), again.epsilon("a")) == (first.seed(task), first.epsilon("a"))
    assert again.epsilon("a") == ON.epsilon({5: 3})
    assert account.read_bytes() == whole
    account.write_bytes(b"{}\n" + whole)
    with pytest.raises(FederatedError, match=r"answers.jsonl is damaged: 'sums'"):
        SitePrivacy(tmp_path / "privacy", ON)
    account.unlink()
    with pytest.raises(FederatedError, match=r"answers.jsonl is missing. It holds what the site's clients have spent"):
        SitePrivacy(tmp_path / "privacy", ON)
    account.write_bytes(whole)
    secret.write_bytes(b"short")
    with pytest.raises(FederatedError, match="secret is damaged: it has 5 bytes"):
        SitePrivacy(tmp_path / "privacy", ON)


def test_full_disk_blocks_the_answer_and_leaves_no_partial_line(tmp_path: Path) -> None:
    at = {"format": 1, "run": "0123456789abcdef", "phase": "train", "round": 0, "attempt": 0, "client": "a"}
    task, reply = Message({**at, "steps": 3}, {"x": torch.zeros(2)}), Message({**at, "loss": 1.0})
    resource = pytest.importorskip("resource")
    site, account = SitePrivacy(tmp_path / "privacy", ON), tmp_path / "privacy" / "answers.jsonl"
    site.answer(task, 5, 3, 5, lambda: reply)
    whole, other = account.read_bytes(), Message({**at, "steps": 2}, task.tensors)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            site.answer(other, 5, 2, 5, lambda: reply)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert account.read_bytes() == whole
    site.answer(other, 5, 2, 5, lambda: reply)
    again = SitePrivacy(tmp_path / "privacy", ON)
    assert again.epsilon("a") == site.epsilon("a") == ON.epsilon({5: 5})


def test_retried_task_costs_more_only_if_its_answer_does(tmp_path: Path) -> None:
    at = {"format": 1, "run": "0123456789abcdef", "phase": "train", "round": 0, "attempt": 0, "client": "a"}
    task, reply = Message({**at, "steps": 3}, {"x": torch.zeros(2)}), Message({**at, "loss": 1.0})
    site = SitePrivacy(tmp_path / "privacy", ON)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            site.answer(task, 5, 3, 5, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert site.epsilon("a") == ON.epsilon({5: 3})
    one = ON.epsilon({5: 3, 2: 3})
    assert one > 1.1 * site.epsilon("a")
    strict = SitePrivacy(tmp_path / "privacy", ON, max_epsilon=0.99 * one)
    with pytest.raises(FederatedError, match="would spend epsilon"):
        strict.answer(task, 2, 3, 2, lambda: reply)  # the data have changed
    for privacy in (SitePrivacy(tmp_path / "privacy", ON), SitePrivacy(tmp_path / "privacy", ON)):
        assert privacy.answer(task, 2, 3, 2, lambda: reply) is reply
        assert privacy.epsilon("a") == one


def test_repaired_folder_can_be_used_immediately(tmp_path: Path) -> None:
    secret = tmp_path / "privacy" / "secret"
    given = MAKE(), model(), make_data([0]), 0, tmp_path
    secret.parent.mkdir()
    secret.write_bytes(b"short")
    (secret.parent / "answers.jsonl").touch()
    with pytest.raises(FederatedError, match="secret is damaged") as kept:
        FederatedSite(*given)
    secret.write_bytes(bytes(32))
    FederatedSite(*given).close()
    assert kept.tb, "which holds the first site, as a notebook does"


def test_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "privacy").write_text("a file")
    with pytest.raises(FederatedError, match="The site's folder .*privacy cannot be used: File exists"):
        SitePrivacy(tmp_path / "privacy", ON)


def test_different_tasks_have_different_digests() -> None:
    header = {"run": "a", "phase": "train", "round": 0, "attempt": 0, "client": 0, "steps": 3}
    base = Message(header, {"x": torch.tensor([1.0, 2.0]), "server.c": torch.zeros(2)})
    other = [replace(base, header={**header, name: value}) for name, value in
             [("run", "b"), ("round", 1), ("client", "0"), ("steps", None), ("first_step", 0)]]  # fmt: skip
    other += [
        replace(base, tensors=tensors)
        for tensors in (
            {"x": torch.tensor([1.0, -2.0]), "server.c": torch.zeros(2)},
            {"x": torch.tensor([1.0, 2.0])},
            {"x": torch.tensor([1.0, 2.0]), "server.d": torch.zeros(2)},
            {"x": torch.tensor([1.0, 2.0]), "server.c": torch.zeros(2, 1)},
            {"x": torch.tensor([1.0, 2.0]), "server.c": torch.zeros(1, dtype=torch.float64)},
            {"x": torch.tensor([1.0, 2.0, 0.0, 0.0]), "server.c": torch.zeros(0)},
        )
    ]
    found = [digest_of(message) for message in (base, *other)]
    assert len(set(found)) == len(found)
    assert digest_of(replace(base, header={**header, "attempt": 1})) == found[0]
    assert digest_of(Message.from_bytes(base.to_bytes())) == found[0]
    assert seed_of(bytes(32), found[0]) not in (seed_of(bytes(32), found[1]), seed_of(bytes([1] * 32), found[0]))


def test_private_sites_require_equal_noise_and_no_measuring_callback(tmp_path: Path) -> None:
    wire = Wire(tmp_path, MAKE)
    for other in (ClientPrivacy(0.7, 0.3, 1e-3), ClientPrivacy(0.8, 0.3, 1e-3, "shuffle"), None):
        with pytest.raises(FederatedError, match="has other settings than the server: its client_privacy is"):
            wire.run(trainer=MAKE(client_privacy=other))
        wire.kill()
    wire.run(trainer=MAKE(client_privacy=ClientPrivacy(0.8, 0.3, 1e-2, examples_at_once=2), max_rounds=1))
    with pytest.raises(FederatedError, match="cannot be combined with the callback ClientAccuracy"):
        Wire(tmp_path / "measured", partial(MAKE, callbacks=[ClientAccuracy()])).run()
