from __future__ import annotations

from pathlib import Path

import pytest

from w4a4.cli.newest_checkpoint import newest_checkpoint, remember_checkpoint, state_folder
from w4a4.configs.errors import NotFoundError


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_the_last_one_wins_and_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert remember_checkpoint(first)
    assert remember_checkpoint(Path("b"))
    monkeypatch.chdir("/")
    assert newest_checkpoint() == second
    assert state_folder() == tmp_path / "state"


def test_none_yet_and_gone_say_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="has not written one") as refused:
        newest_checkpoint()
    assert "w4a4 quantize" in refused.value.hint
    folder = make(tmp_path / "a")
    remember_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(NotFoundError, match="is gone"):
        newest_checkpoint()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"path": 3}', "null"])
def test_a_spoiled_note_is_as_good_as_none(content: str) -> None:
    state_folder().mkdir()
    (state_folder() / "newest-checkpoint.json").write_text(content)
    with pytest.raises(NotFoundError):
        newest_checkpoint()


def test_a_state_folder_that_cannot_be_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("W4A4_STATE", str(tmp_path / "file" / "state"))
    assert not remember_checkpoint(make(tmp_path / "a"))


def test_the_state_folder_follows_the_desktop_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("W4A4_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "w4a4"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local" / "state" / "w4a4"
