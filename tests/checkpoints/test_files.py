"""Checkpoint files are complete or absent, damage is named, and the newest valid file is offered."""

import errno
import multiprocessing
import os
import random
import resource
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_fed.checkpoints import files as checkpoint_io
from lightning_fed.checkpoints.files import AtomicCheckpointIO, damage_of, link, newest_valid, remove_temporary_files
from lightning_fed.core.errors import FederatedError
from tests.helpers.checkpoints import run_keeping as run
from tests.helpers.selection import few
from tests.helpers.training import Net, fit, same, seeded, trainer


class Untrained(Net):
    """A module that must not be trained."""

    def training_step(self, *_: Any) -> Any:
        pytest.fail("a client was trained")


CONTENT = {"x": torch.arange(500.0), "optimizer_states": [], "note": "whole"}


def save(path: Path, **content: Any) -> Path:
    AtomicCheckpointIO().save_checkpoint({**CONTENT, **content}, path)
    return path


# ---------------------------------------------------------------------- writing


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("at", [0, 3, 20])
def test_failing_disk_keeps_the_previous_checkpoint(
    number: int, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = save(tmp_path / "a.ckpt"), iter(range(1000))

    class Failing:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, part: Any) -> int:
            if next(calls) >= at:
                self.stream.write(bytes(part)[: len(bytes(part)) // 2])
                raise OSError(number, os.strerror(number))
            return self.stream.write(part)

    whole = checkpoint_io._write
    monkeypatch.setattr(checkpoint_io, "_write", lambda content, stream: whole(content, Failing(stream)))
    with pytest.raises(FederatedError, match=f"a.ckpt could not be written: {os.strerror(number)}") as caught:
        save(path, note="other")
    assert isinstance(caught.value.__cause__, OSError)
    assert AtomicCheckpointIO().load_checkpoint(path)["note"] == "whole"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def _write_with_a_limit(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        save(folder / "a.ckpt", x=torch.arange(50_000.0))
    except FederatedError as error:
        (folder / "said").write_text(str(error))


def test_file_size_limit_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    process = multiprocessing.get_context("fork").Process(target=_write_with_a_limit, args=(tmp_path,))
    process.start()
    process.join(30)
    assert "could not be written: File too large" in (tmp_path / "said").read_text()
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")["note"] == "whole"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "said"]


def test_file_and_folder_are_flushed_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("flush"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b)))
    save(tmp_path / "new" / "a.ckpt")
    assert calls == ["flush", "rename", "flush"]


def test_save_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    link(save(tmp_path / "a.ckpt"), tmp_path / "last.ckpt")
    save(tmp_path / "last.ckpt", note="new")
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")["note"] == "whole"


def test_link_is_updated_when_its_target_is_removed(tmp_path: Path) -> None:
    link(save(tmp_path / "a.ckpt"), tmp_path / "last.ckpt")
    os.utime(tmp_path / "a.ckpt", (1, 1))
    save(tmp_path / "b.ckpt", note="newer")
    AtomicCheckpointIO().remove_checkpoint(tmp_path / "a.ckpt")
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["note"] == "newer"


def test_last_link_never_disappears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, remove, seen = os.replace, os.remove, []

    def watched(source: Any, target: Any) -> None:
        seen.append((tmp_path / "last.ckpt").exists())
        replace(source, target)
        seen.append((tmp_path / "last.ckpt").exists())

    def watched_too(path: Any) -> None:
        remove(path)
        seen.append((tmp_path / "last.ckpt").exists())

    monkeypatch.setattr(os, "replace", watched)
    monkeypatch.setattr(os, "remove", watched_too)
    run(tmp_path, 3, keep=ModelCheckpoint(tmp_path, save_last="link"))
    assert seen == [False, False, False, *[True] * (len(seen) - 3)]
    assert (tmp_path / "last.ckpt").resolve().name == "epoch=2-step=3.ckpt"


def test_last_is_a_copy_if_links_are_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.warns(UserWarning, match="cannot hold symbolic links: last.ckpt is a copy"):
        run(tmp_path, 3, keep=ModelCheckpoint(tmp_path, save_last="link"))
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "last.ckpt").read_bytes() == (tmp_path / "epoch=2-step=3.ckpt").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_leftovers_are_removed_and_a_running_save_is_kept(tmp_path: Path) -> None:
    (tmp_path / ".a.ckpt.77.part").write_bytes(b"half")
    with (tmp_path / ".b.ckpt.78.part").open("wb") as stream:
        checkpoint_io._lock(stream)
        assert [gone.name for gone in remove_temporary_files(tmp_path)] == [".a.ckpt.77.part"]
    assert os.listdir(tmp_path) == [".b.ckpt.78.part"]


def test_fit_removes_leftovers_of_a_killed_save(tmp_path: Path) -> None:
    (tmp_path / ".last.ckpt.77.part").write_bytes(b"half")
    run(tmp_path, 1)
    assert os.listdir(tmp_path) == ["step=1.ckpt"]


def test_leftovers_that_cannot_be_removed_are_kept(tmp_path: Path) -> None:
    (tmp_path / ".a.ckpt.77.part").mkdir()
    assert remove_temporary_files(tmp_path) == []
    run(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == [".a.ckpt.77.part", "step=1.ckpt"]


def test_unusable_checkpoint_folder_is_rejected_before_the_first_round(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FederatedError, match=f"ModelCheckpoint cannot save in {tmp_path / 'file' / 'a'}: .*dirpath"):
        run(tmp_path / "file" / "a", 1, model=Untrained())
    run(tmp_path / "file" / "a", 0, model=Untrained(), keep=ModelCheckpoint(tmp_path / "file" / "a", save_top_k=0))


def test_clock_set_back_does_not_hide_the_newest_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, 2)
    for name in ("step=1.ckpt", "step=2.ckpt"):
        os.utime(tmp_path / name, ns=(2 * time.time_ns(),) * 2)
    assert run(tmp_path, 4, ckpt_path=tmp_path / "step=2.ckpt").fit_loop.round == 4
    assert run(tmp_path, 5, ckpt_path="last").ckpt_path == str(tmp_path / "step=4.ckpt")


def test_remote_paths_are_left_to_fsspec(tmp_path: Path) -> None:
    straight = run(tmp_path, 3)
    run(tmp_path, 2, keep=ModelCheckpoint("memory://checkpoints", filename="{step}"))
    resumed = run(tmp_path / "other", 3, ckpt_path="memory://checkpoints/step=2.ckpt")
    assert torch.equal(resumed.fit_loop.state.x, straight.fit_loop.state.x)


def test_user_checkpoint_io_is_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Own(TorchCheckpointIO):
        pass

    own = Own()
    assert trainer(plugins=[own]).strategy.checkpoint_io is own
    assert caplog.text.count("Checkpoints are written and read by Own") == 1
    assert type(trainer().strategy.checkpoint_io) is AtomicCheckpointIO


# ---------------------------------------------------------------------- reading


def test_changed_bytes_are_detected(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    whole, stream = path.read_bytes(), random.Random(0)
    noticed = 0
    for position in stream.sample(range(len(whole)), 400):
        changed = bytearray(whole)
        changed[position] ^= 1 << stream.randrange(8)
        path.write_bytes(changed)
        try:
            found = AtomicCheckpointIO().load_checkpoint(path)
        except FederatedError:
            noticed += 1
        else:
            assert same(found, CONTENT), position
    assert noticed > 200


def test_truncation_is_detected(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    whole = path.read_bytes()
    for size in [0, 1, 30, *random.Random(0).sample(range(len(whole)), 60), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(FederatedError, match="is damaged"):
            AtomicCheckpointIO().load_checkpoint(path)


def test_torch_alone_accepts_a_changed_byte(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes().replace(torch.tensor([41.0]).numpy().tobytes(), b"\x01\x02\x03\x04"))
    assert not same(torch.load(path, weights_only=True), CONTENT)  # torch misses it, so the checksum is verified first
    assert "the checksum" in str(damage_of(path))


def damage(path: Path) -> None:
    """Change a byte in the middle of the largest entry, since bytes between entries are not content."""
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda info: info.file_size)
    content = bytearray(path.read_bytes())
    name, extra = struct.unpack("<HH", content[entry.header_offset + 26 : entry.header_offset + 30])
    content[entry.header_offset + 30 + name + extra + entry.file_size // 2] ^= 8
    path.write_bytes(content)


@pytest.mark.parametrize("save_last", few([True, "link"], ["link"]))
def test_corrupt_last_is_rejected_and_the_newest_valid_one_offered(save_last: Any, tmp_path: Path) -> None:
    keep = {"filename": "{step}", "save_top_k": -1, "save_last": save_last}
    run(tmp_path, 3, keep=ModelCheckpoint(tmp_path, **keep))
    damage(tmp_path / "last.ckpt")
    best = "step=3.ckpt" if save_last is True else "step=2.ckpt"
    with pytest.raises(FederatedError, match=rf"is damaged: .*ckpt_path='.*{best}'"):
        run(tmp_path, 4, ckpt_path="last", keep=ModelCheckpoint(tmp_path, **keep))
    straight = run(tmp_path / "straight", 5)
    offered = run(tmp_path / "again", 5, ckpt_path=tmp_path / best)
    assert torch.equal(offered.fit_loop.state.x, straight.fit_loop.state.x)


def test_unreadable_file_is_not_reported_as_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.ckpt")
    monkeypatch.setattr(os, "access", lambda file, mode: False)  # root may read every file
    with pytest.raises(FederatedError, match=r"a\.ckpt cannot be read: Permission denied\. Let this user read it"):
        AtomicCheckpointIO().load_checkpoint(path)


def test_error_suggests_a_new_run_without_a_valid_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"nothing")
    with pytest.raises(FederatedError, match="no valid checkpoint next to it. Start a new run"):
        run(tmp_path, 1, ckpt_path=tmp_path / "a.ckpt")


def test_newest_valid_skips_weights_only_and_corrupt_files(tmp_path: Path) -> None:
    save(tmp_path / "old.ckpt")
    for i, name in enumerate(["weights.ckpt", "broken.ckpt", "last.ckpt"]):
        os.utime(tmp_path / "old.ckpt", (1, 1))
        if name == "weights.ckpt":
            torch.save({"state_dict": {}}, tmp_path / name)
        else:
            (tmp_path / name).write_bytes(b"PK")
        os.utime(tmp_path / name, (10 + i, 10 + i))
    assert newest_valid(tmp_path) == tmp_path / "old.ckpt"


@pytest.mark.parametrize(("change", "age"), [(1, "a newer"), (-1, "an older")])
def test_checkpoint_of_another_format_is_rejected(change: int, age: str, tmp_path: Path) -> None:
    run(tmp_path, 1)
    content = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    content["loops"]["fit_loop"]["state_dict"]["format"] += change
    torch.save(content, tmp_path / "step=1.ckpt")
    with pytest.raises(FederatedError, match=f"written by {age} version of lightning_fed: its format is"):
        run(tmp_path, 2, ckpt_path=tmp_path / "step=1.ckpt")


def test_weights_only_checkpoint_sets_the_initial_model(tmp_path: Path) -> None:
    run(tmp_path, 1, keep=ModelCheckpoint(tmp_path, filename="w", save_weights_only=True))
    weights = torch.load(tmp_path / "w.ckpt", weights_only=True)["state_dict"]
    with pytest.warns(
        UserWarning, match=r"save_weights_only=True: the run cannot continue from round 1\. It starts at"
    ):
        began = fit(max_rounds=1, ckpt_path=tmp_path / "w.ckpt")
    other = seeded()
    other.load_state_dict(weights)
    assert torch.equal(began, fit(other, max_rounds=1))
    assert not torch.equal(began, fit(max_rounds=1))


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("broken-into",)


def test_checkpoint_that_would_run_code_is_rejected(tmp_path: Path) -> None:
    torch.save({**CONTENT, "state_dict": Hostile()}, tmp_path / "a.ckpt")
    with pytest.raises(FederatedError, match="would run code when it is read"):
        run(tmp_path, 1, ckpt_path=tmp_path / "a.ckpt")
    assert not Path("broken-into").exists()
