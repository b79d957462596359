import os
from pathlib import Path

import pytest

from agentrl.data.files import damage
from agentrl.distributed.checkpoints import checkpoints, newest_step, write_folder


def fill(folder: Path) -> None:
    (folder / "shards").mkdir()
    (folder / "shards" / "one.safetensors").write_bytes(b"weights")
    (folder / "agentrl.json").write_text("{}")


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, rename = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_folder(tmp_path / "step-000001", fill, is_sealed=True)
    *before, at, after = calls
    assert sorted(before) == [".step-000001.partial", "agentrl.json", "files.json", "one.safetensors", "shards"]
    assert before[-1] == ".step-000001.partial"
    assert (at, after) == ("rename", tmp_path.name)


def test_what_was_sealed_is_told_from_what_it_has_become(tmp_path: Path) -> None:
    folder = tmp_path / "step-000001"
    write_folder(folder, fill, is_sealed=True)
    (folder / "notes.txt").write_text("of a user")
    assert damage(folder) is None
    (folder / "agentrl.json").write_text("[]")
    assert damage(folder) == f"the checksum of {folder / 'agentrl.json'} is another"
    (folder / "agentrl.json").write_text("{")
    assert damage(folder) == f"{folder / 'agentrl.json'} has 1 bytes of 2"
    (folder / "agentrl.json").unlink()
    assert damage(folder) == f"{folder / 'agentrl.json'} is missing"
    (folder / "files.json").write_text('{"../outside": {"size": 1, "crc32": 1}}')
    assert damage(folder) == f"{folder / 'files.json'} names ../outside, which lies elsewhere"
    (folder / "files.json").write_text("[]")
    assert damage(folder) == f"{folder / 'files.json'}: Input should be a valid dictionary"
    (folder / "files.json").unlink()
    assert damage(folder) == f"{folder / 'files.json'}: No such file or directory"


def test_only_folders_of_a_whole_name_are_checkpoints(tmp_path: Path) -> None:
    assert (checkpoints(tmp_path / "none"), newest_step(tmp_path / "none")) == ([], None)
    for name in ("step-000002", "step-1000000", "step-000004-backup", "step-5", "step-000010.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000009").write_text("notes")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-1000000"]
    assert newest_step(tmp_path) == 1_000_000
