"""Sites agree on the words of columns, so that all of them number the words alike."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import Absent, FederatedSite, Message, Refusal, RemoteClients
from tests.deploy.wire import EndedError, Rounds, parameters
from tests.deploy.words import AGREED, MAKE, WARDS, make_val, model, table, write
from tests.helpers.optional import needs_pyarrow

pytestmark = needs_pyarrow


class Sites:
    """A transport to the sites of three hospitals, each with its own file. Replies arrive in the order of ``order``."""

    def __init__(self, folder: Path, order: Sequence[str] = tuple(WARDS), make: Callable[[], Any] = MAKE) -> None:
        self.folder, self.order, self.make = folder, order, make
        folder.mkdir(exist_ok=True)
        self.open: dict[str, FederatedSite] = {}
        self.options: dict[str, dict[str, Any]] = {client: {} for client in WARDS}
        self.shared: dict[str, list[str]] = {client: ["ward", "sex"] for client in WARDS}
        self.tasks: list[Message] = []
        self.replies: list[Message] = []
        self.comes: Callable[[Message], Message] = self.answer
        for client in WARDS:
            write(folder / f"{client}.csv", [client])

    def answer(self, task: Message) -> Message:
        client = str(task.client)
        self.tasks.append(task)
        if client not in self.open:
            data = table(self.folder / f"{client}.csv", **self.options[client])
            given = self.make(), model(), data, client, self.folder / f"{client} kept"
            self.open[client] = FederatedSite(*given, share_words=self.shared[client])
        self.replies.append(Message.from_bytes(self.open[client].answer(task).to_bytes()))
        return self.replies[-1]

    def exchange(self, tasks: Any, registrations: Any) -> Iterator[Message | Refusal | Absent]:
        for client in sorted({**tasks, **registrations}, key=self.order.index):
            try:
                yield self.comes({**registrations, **tasks}[client])
            except FederatedError as error:
                yield Refusal(client, str(error))

    def kill(self) -> None:
        for site in self.open.values():
            site._states.close()
        self.open = {}

    def run(self, trainer: FederatedTrainer | None = None, ckpt_path: Any = None, **options: Any) -> Any:
        module, clients = model(), RemoteClients(self, list(WARDS), **{"agree_on": ["ward"], **options})
        (trainer or self.make()).fit(module, clients, ckpt_path=ckpt_path)
        return module


def simulated(folder: Path) -> Any:
    """Fit on one file with all rows. Its words are the sorted words of all sites."""
    write(folder / "all.csv", list(WARDS))
    module, data = model(), table(folder / "all.csv")
    MAKE().fit(module, data)
    assert list(data.client_ids) == list(WARDS)
    assert data.feature_names == ["age", *(f"ward={word}" for word in AGREED["ward"]), "ward unused 6"]
    return parameters(module)


def test_words_of_an_absent_client_are_awaited(tmp_path: Path) -> None:
    class Absents(Sites):
        def exchange(self, tasks: Any, registrations: Any) -> Iterator[Message | Refusal | Absent]:
            yield Absent(self.order[-1:], "its line is cut")
            yield from super().exchange(tasks, registrations)

    trainer = MAKE(on_client_error="drop", max_rounds=1)
    Absents(tmp_path, order=["north", "west", "south"]).run(trainer)
    assert trainer.fit_loop.run_state.sites["words"] == AGREED


@pytest.mark.thorough
def test_sites_number_words_alike_in_any_order_and_after_kills(
    tmp_path: Path,
) -> None:
    expected = simulated(tmp_path)
    calm = Sites(tmp_path / "calm")
    assert torch.equal(parameters(calm.run()), expected)
    words = [reply for reply in calm.replies if reply.header["phase"] == "words"]
    at = {"format": 1, "phase": "words", "round": 0, "attempt": 0}
    for client, reply in zip(WARDS, words, strict=True):
        assert not reply.tensors
        assert {name: value for name, value in reply.header.items() if name != "run"} == {
            **at, "client": client, "words": {"ward": sorted(WARDS[client])},
        }  # fmt: skip
    assert all("words" not in reply.header for reply in calm.replies if reply.header["phase"] != "words")
    registration = next(task for task in calm.tasks if task.header["phase"] == "register")
    other = {"run": "0123456789abcdef", "words": {"ward": ["arm", *AGREED["ward"]]}}
    found = calm.answer(replace(registration, header={**registration.header, **other})).header["columns"]
    assert found[1:3] == ["ward=arm", f"ward={AGREED['ward'][0]}"], "each run has its own words on a site"

    killed, checkpoint = Sites(tmp_path / "killed", order=["west", "south", "north"]), tmp_path / "last.ckpt"

    def ends(task: Message) -> Message:
        if task.header["round"] == 2:
            raise EndedError
        reply = killed.answer(task)
        killed.kill()  # the next task starts a new process, which reads the words from its disk
        return reply

    killed.comes, first = ends, MAKE()
    first.callbacks.insert(0, Rounds({None: checkpoint}))
    with pytest.raises(EndedError):
        killed.run(first)
    killed.kill()
    killed.comes = killed.answer
    second = MAKE()
    assert torch.equal(parameters(killed.run(second, checkpoint)), expected)
    assert second.fit_loop.run_state.sites["words"] == AGREED
    assert sum(reply.header["phase"] == "words" for reply in killed.replies) == 3, "they are not asked again"
    with pytest.raises(FederatedError, match=r"agreed on the words of \['ward'\] when the run began, .* agree_on=\[\]"):
        killed.run(MAKE(), checkpoint, agree_on=[])
    with pytest.raises(FederatedError, match=r"agreed on the words of \['ward'\].*agree_on=\['ward', 'sex'\]"):
        killed.run(MAKE(), checkpoint, agree_on=["ward", "sex"])


def test_words_leave_a_site_only_if_operator_and_data_module_allow(tmp_path: Path) -> None:
    sites = Sites(tmp_path)
    sites.shared["south"] = ["sex"]
    said = r"column 'ward', and the site of client 'south' lets those of \['sex'\] leave. Its operator may add columns"
    with pytest.raises(FederatedError, match=said):
        sites.run()
    assert not [reply for reply in sites.replies if reply.client == "south"]
    sites.kill()
    sites.shared["south"] = ["ward"]
    sites.options["south"] = {"categories": {"ward": AGREED["ward"]}}
    with pytest.raises(FederatedError, match="the run agrees on the words of column 'ward', and the table has no room"):
        sites.run()
    sites.kill()
    sites.options["south"] = {}
    with pytest.raises(FederatedError, match=r"column 'ward' come from the rows.*RemoteClients\(agree_on=\['ward'\]"):
        sites.run(agree_on=[])
    assert not [reply for reply in sites.replies if "columns" in reply.header], "no word leaves with the registration"
    for options in ({"agree_on": "ward"}, {"agree_on": [1]}):
        with pytest.raises(FederatedError, match=r"RemoteClients\(agree_on=.*must be a list of columns"):
            RemoteClients(sites, list(WARDS), **options)  # type: ignore[arg-type]
    with pytest.raises(FederatedError, match=r"FederatedSite\(share_words='ward'\)"):
        FederatedSite(MAKE(), model(), table(tmp_path / "west.csv"), "west", tmp_path / "x", share_words="ward")


def test_late_site_with_unknown_word_or_without_room_is_rejected(tmp_path: Path) -> None:
    sites = Sites(tmp_path, make=partial(MAKE, on_client_error="drop", max_failed_share=0.9))
    late = {"words", "register"}

    def comes(task: Message) -> Message:
        if task.client == "west" and task.header["phase"] in late:
            raise FederatedError("it is away")
        return sites.answer(task)

    sites.comes = comes
    trainer = sites.make()
    trainer.callbacks.insert(0, Rounds({1: tmp_path / "one.ckpt"}))
    sites.run(trainer)
    assert trainer.fit_loop.run_state.sites["words"] == AGREED, "west has no other words"
    sites.kill()
    late.clear()
    write(tmp_path / "west.csv", ["west"], ["heart"])
    for client, options, said in (
        ("west", {}, r"column 'ward' holds 'heart', and its words are \['10', '9', 'eye', 'surgery', 'Éye'\]"),
        ("north", {"room": 4}, r"column 'ward' has 5 words, and categories=\{'ward': 4\} is room for 4"),
    ):
        sites.options[client] = options
        with pytest.raises(FederatedError, match=said):
            sites.run(MAKE(), tmp_path / "one.ckpt")
        sites.kill()
        write(tmp_path / "west.csv", ["west"])


def test_late_site_with_unknown_word_joins_if_unknowns_are_allowed(tmp_path: Path) -> None:
    make = partial(MAKE, on_client_error="drop", max_failed_share=0.9, clients_per_round=3)
    sites = Sites(tmp_path, ["west", "north", "south"], make)
    for client in WARDS:
        sites.options[client] = {"unknown": ["ward"], "room": 5}
    write(tmp_path / "west.csv", ["west"], ["heart"])

    def comes(task: Message) -> Message:
        if task.client == "west" and not [r for r in sites.replies if r.header["phase"] == "train"]:
            raise FederatedError("it is away")
        return sites.answer(task)

    sites.comes = comes
    trainer = sites.make()
    sites.run(trainer)
    assert trainer.fit_loop.run_state.sites["words"] == AGREED
    assert sites.open["west"]._data.feature_names[-1] == "ward unknown"
    assert [reply.client for reply in sites.replies if reply.header["phase"] == "train"].count("west") > 0


@pytest.mark.parametrize(
    "words", [None, [], {"sex": ["f"]}, {"ward": "eye"}, {"ward": ["a\nb"]}, {"ward": ["x" * 201]}, {"ward": [1]},
              {"ward": ["a", "a"]},
              {"ward": [str(n) for n in range(1001)]}], ids=lambda words: repr(words)[:30],
)  # fmt: skip
def test_invalid_words_are_rejected_by_server_and_sites(words: Any, tmp_path: Path) -> None:
    sites = Sites(tmp_path)

    def comes(task: Message) -> Message:
        reply = sites.answer(task)
        return replace(reply, header={**reply.header, "words": words}) if task.client == "south" else reply

    sites.comes = comes
    with pytest.raises(FederatedError, match="The reply of client 'south' is not valid: its (words|ward) is"):
        sites.run()

    def tells(task: Message) -> Message:
        if task.header["phase"] == "register" and task.client == "south":
            assert task.header["words"] == AGREED
            task = replace(task, header={**task.header, "words": words})
        return sites.answer(task)

    sites.comes = tells
    if words != {"sex": ["f"]}:
        with pytest.raises(FederatedError, match="The server's registration request is not valid: its (words|ward) is"):
            sites.run()


@pytest.mark.parametrize("word", ["", "NA", " eye", "eye "])
def test_site_cannot_add_a_missing_value_marker_as_a_word(word: str, tmp_path: Path) -> None:
    sites = Sites(tmp_path)

    def comes(task: Message) -> Message:
        reply = sites.answer(task)
        if task.client == "south" and task.header["phase"] == "words":
            reply = replace(reply, header={**reply.header, "words": {"ward": ["eye", word]}})
        return reply

    sites.comes = comes
    with pytest.raises(
        FederatedError, match="client 'south' is not valid: '.*' in its ward stands for a missing value"
    ):
        sites.run()


def test_too_many_words_are_rejected_and_the_largest_client_is_named(tmp_path: Path) -> None:
    sites = Sites(tmp_path)

    def comes(task: Message) -> Message:
        reply = sites.answer(task)
        if task.client == "south" and task.header["phase"] == "words":
            reply = replace(reply, header={**reply.header, "words": {"ward": [f"w{n}" for n in range(1000)]}})
        return reply

    sites.comes = comes
    with pytest.raises(FederatedError, match=r"1,004 words of column 'ward' in all.*Client 'south' has the most"):
        sites.run()
    assert not [reply for reply in sites.replies if reply.header["phase"] == "register"]


def test_similar_looking_words_are_logged_by_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sites = Sites(tmp_path)
    for client in WARDS:
        sites.options[client] = {"room": 9}
    write(tmp_path / "west.csv", ["west"], ["E\u0301ye", "Surgery"])
    with pytest.raises(FederatedError):  # the model has room for fewer
        sites.run()
    said = "words of column 'ward' that look alike and count as different ones: 'Surgery' and 'surgery', and 1 more."
    assert caplog.text.count("look alike") == 1
    assert said in caplog.text


def test_server_cannot_probe_the_words_of_an_unshared_column(tmp_path: Path) -> None:
    sites = Sites(tmp_path)
    sites.run(MAKE(max_rounds=1))
    registration = next(task for task in sites.tasks if task.header["phase"] == "register" and task.client == "west")
    sites.kill()
    sites.shared["west"] = ["sex"]
    for words in (["9", "10"], ["9", "10", "surgery"]):  # lists without and with all of the site's words
        with pytest.raises(FederatedError, match=r"asks for the words of column 'ward', and the site of client 'west'"):
            sites.answer(replace(registration, header={**registration.header, "words": {"ward": words}}))


def test_server_validation_set_can_use_the_agreed_words(tmp_path: Path) -> None:
    trainer = MAKE(max_rounds=1, limit_val_batches=1.0)
    Sites(tmp_path).run(trainer, val=lambda words: make_val(dict(words)))
    assert "val_acc" in trainer.callback_metrics
