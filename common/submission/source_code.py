"""Copy the code of a submission: a commit of this suite, or the folder of another implementation.

Names with spaces and files above 50 MB are refused before they are copied, because the repository checker rejects
them. Names that begin with a dot belong to tools, not to the implementation, and are omitted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

from common.errors import ConfigError, DataError

LARGEST_FILE = 50 * 1024 * 1024
"""Size in bytes of the largest file that the repository checker accepts."""

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def export_commit(repository: Path, commit: str, target: Path) -> None:
    """Write the files of ``commit`` below ``target``.

    Raises:
        ConfigError: git is missing, the repository or commit does not exist, or the checkers would reject a file.
    """
    if not _COMMIT.fullmatch(commit):
        raise ConfigError(f"{commit!r} is no commit; runs.jsonl must name the one that the runs used")
    command = ["git", "-C", str(repository), "archive", "--format=tar", commit]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise ConfigError(f"git cannot be run: {error.strerror}; the submission's code comes from it") from error
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    _extract(archive, member, target, f"{repository} at {commit[:12]}")
        except tarfile.ReadError as error:
            reason = process.stderr.read().decode(errors="replace").strip() or str(error)
            raise ConfigError(
                f"{repository}: the runs' commit {commit} cannot be exported: {reason}; name the clone that has it "
                "with --repository"
            ) from error


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, where: str) -> None:
    name = PurePosixPath(member.name)
    if member.isdir() or _left_out(name):
        return
    if not member.isfile():
        raise ConfigError(f"{where}: {name} is a link: submissions hold plain files only")
    _check(name, member.size, where)
    content = archive.extractfile(member)
    assert content is not None
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("wb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def copy_folder(folder: Path, target: Path) -> None:
    """Copy the files below ``folder`` to ``target``.

    Raises:
        ConfigError: the folder is missing or has no code, or the checkers would reject a file, such as a link.
        DataError: a file cannot be read.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    files = [path for path in found if not _left_out(PurePosixPath(path.relative_to(folder)))]
    if not files:
        raise ConfigError(f"{folder}: is no folder with code")
    for path in files:
        name = path.relative_to(folder)
        if not path.is_file() or path.is_symlink():
            raise ConfigError(f"{path}: is a link or no file: submissions hold plain files only")
        copy = target / name
        try:
            _check(PurePosixPath(name), path.stat().st_size, str(folder))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            shutil.copymode(path, copy)
        except OSError as error:
            raise DataError(f"{path}: cannot be copied: {error.strerror}") from error


def _left_out(name: PurePosixPath) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in name.parts)


def _check(name: PurePosixPath, size: int, where: str) -> None:
    if any(" " in part for part in name.parts):
        raise ConfigError(f"{where}: {str(name)!r} has a space in its name, which the repository checker rejects")
    if size > LARGEST_FILE:
        raise ConfigError(
            f"{where}: {name} has {size / 2**20:.1f} MiB; the repository checker rejects files above 50: fetch it in "
            "setup.sh instead"
        )
