"""Reads and checks the files that a user names; outputs are checked before any work begins."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

LFS_POINTER = b"version https://git-lfs"


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file, as `decode_text` does. Raises `ValueError` if it can't be read."""
    try:
        return decode_text(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read ({error}): pass the path of a text file in UTF-8.") from error


def decode_text(data: bytes) -> str:
    """Returns the text of a file's bytes, without a byte order mark; every line ends with a line feed on every system.

    Raises `UnicodeDecodeError` for bytes that are not UTF-8.
    """
    return data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def check_output_folder(folder: Path) -> None:
    """Raises `ValueError` if `folder` can't be created or written. Creates neither files nor folders."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{folder} can't be written: {error.strerror} in {existing}. Pass another path.") from error


def check_output_file(path: Path) -> None:
    """Raises `ValueError` if the file `path` can't be written. Its folder must exist."""
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    elif not path.exists():
        check_output_folder(path.parent)
    elif not os.access(path, os.W_OK):
        reason = "it is read-only"
    if reason is not None:
        raise ValueError(f"{path} can't be written: {reason}. Pass another path.")


def check_not_linked(*paths: Path) -> None:
    """Raises `ValueError` if a file to write is a link: its target may be a file in another folder."""
    if linked := [path for path in paths if path.is_symlink()]:
        raise ValueError(f"{linked[0]} is a link, and results are not written through links: delete it.")


def check_new_folder(folder: Path) -> None:
    """Raises `ValueError` if `folder` is not empty or can't be written."""
    check_output_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: pass another folder, or delete this one first.")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder whose files are moved into `folder` at the end of the block; an error removes them.

    `folder` may exist if it is empty. Raises `ValueError` if the disk is full or files can't be written.
    """
    folder = folder.resolve()
    existed = folder.is_dir()
    partial = (folder if existed else folder.parent) / f".{folder.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        if existed:  # it may be a mount point, so the files are moved and not the folder
            for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):  # last
                path.rename(folder / path.name)
        else:
            partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} can't be written: {error}. Make room, or pass another path.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def naming_file(path: Path, remedy: str) -> Iterator[None]:
    """Raises `ValueError` with the path and a remedy if the block can't write the file, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error.strerror or error}. {remedy}") from error


@contextmanager
def atomic_file(path: Path, remedy: str = "Make room, or pass another path.") -> Iterator[Path]:
    """Yields a temporary path whose file replaces `path` at the end of the block; an error removes it.

    A link is followed; a device or a pipe is written itself. Raises `ValueError` as `naming_file` does.
    """
    with naming_file(path, remedy):
        target = path.resolve()
        if target.exists() and not target.is_file():
            yield target
            return
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            yield partial
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file that a stopped command continues. Raises `ValueError` as `naming_file` does."""
    remedy = "Make room, and start the same command again: it goes on after the last whole line."
    with naming_file(path, remedy), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def is_lfs_pointer(path: Path) -> bool:
    """Returns whether a file contains a Git LFS pointer instead of its own contents."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def use_default_mode(folder: Path) -> None:
    """Gives safetensors files of mode 0600 the default mode of new files.

    safetensors writes weights with mode 0600, whatever the process's umask.
    """
    with tempfile.TemporaryDirectory(dir=folder) as made:
        probe = Path(made) / "probe"
        probe.touch()
        mode = probe.stat().st_mode & 0o777
    for path in folder.glob("*.safetensors"):
        if path.stat().st_mode & 0o777 == 0o600:
            path.chmod(mode)
