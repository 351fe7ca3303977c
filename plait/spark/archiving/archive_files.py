"""The files of an archive, on any file system that Arrow supports (local, s3://, hdfs://, gs://)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final, Self

import pyarrow as pa
from pyarrow import fs

from plait.errors import ArchiveError

#: The directory of the manifests, and of the votes on them.
DIRECTORY: Final = "_plait"


class ArchiveFiles:
    """The directory of an archive. Paths are relative to it; names are those of files in the manifests' directory."""

    def __init__(self, files: fs.FileSystem, root: str, location: str) -> None:
        self.files = files
        self.root = root.rstrip("/")
        #: The path or URI as the user wrote it, for messages.
        self.location = location

    @classmethod
    def at(cls, location: str | os.PathLike[str]) -> Self:
        """The archive at a path or a URI; it need not exist yet."""
        text = os.fspath(location)
        try:
            if "://" in text:
                files, root = fs.FileSystem.from_uri(text)
            else:
                files, root = fs.LocalFileSystem(), os.path.abspath(text)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise ArchiveError(f"archive {text!r} cannot be reached: {first_line(error)}") from error
        return cls(files, root, text)

    @property
    def address(self) -> str:
        """The path or URI for other processes, independent of their working directory."""
        return self.location if "://" in self.location else self.root

    @property
    def _is_local(self) -> bool:
        return isinstance(self.files, fs.LocalFileSystem)

    def path(self, relative: str) -> str:
        """The path in the file system."""
        return f"{self.root}/{relative}" if relative else self.root

    def names(self) -> list[str]:
        """Names of all files in the manifests' directory that existed when this was called and still do, and perhaps of
        newer files."""
        return [info.base_name for info in self.list(DIRECTORY)]

    def list(self, relative: str, *, recursive: bool = False) -> list[fs.FileInfo]:
        """The content of a directory; empty where it does not exist."""
        selector = fs.FileSelector(self.path(relative), recursive=recursive, allow_not_found=True)
        try:
            found: list[fs.FileInfo] = self.files.get_file_info(selector)
        except (pa.ArrowException, OSError) as error:
            raise ArchiveError(f"{self.location}/{relative} cannot be listed: {first_line(error)}") from error
        return found

    def relative(self, info: fs.FileInfo) -> str:
        """The path of a listed file, relative to the archive."""
        path: str = info.path
        return path[len(self.root) + 1 :]

    def write(self, relative: str, data: bytes) -> None:
        """Write a small file."""
        with self.files.open_output_stream(self.path(relative)) as stream:
            stream.write(data)

    def remove(self, relative: str) -> None:
        """Remove a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.files.delete_file(self.path(relative))

    def make_directory(self, relative: str) -> None:
        """Create a directory and its parents without permissions for other users. Object stores have no directories."""
        path = self.path(relative)
        if not self._is_local:
            self.files.create_dir(path, recursive=True)
            return
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o750)

    def make_durable(self, relative: str) -> None:
        """The content of a file is durable when this returns; its name is after ``sync_names``.

        File systems other than the local one guarantee both when a file is closed.
        """
        if self._is_local:
            sync_path(self.path(relative))

    def sync_names(self, paths: Iterable[str]) -> None:
        """The names of these files, and of the directories that lead to them, are durable when this returns."""
        if not self._is_local:
            return
        directories: set[str] = set()
        for path in paths:
            while path:
                path = os.path.dirname(path)
                directories.add(path)
        for directory in sorted(directories, reverse=True):
            sync_path(self.path(directory))

    # --- the directory of the manifests, with the operations that every store has ---------------

    def has(self, name: str) -> bool:
        """Whether a file exists."""
        found: bool = self.files.get_file_info(self.path(f"{DIRECTORY}/{name}")).type != fs.FileType.NotFound
        return found

    def put(self, name: str, data: bytes = b"") -> None:
        """Write a file; it is complete and durable when this returns."""
        relative = f"{DIRECTORY}/{name}"
        self.write(relative, data)
        if data:
            self.make_durable(relative)
        self.sync_names([relative])

    def discard(self, name: str) -> None:
        """Remove a file if it exists."""
        self.remove(f"{DIRECTORY}/{name}")


def sync_path(path: str) -> None:
    """The content of a local file, or the names in a local directory, are durable when this returns."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def first_line(error: BaseException) -> str:
    """The first line of an error's text: Arrow's errors have several."""
    return str(error).partition("\n")[0]
