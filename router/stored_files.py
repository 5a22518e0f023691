"""Uploaded files and batches' results, on disk: a folder for each, which appears whole or not at all.

Methods block and belong into threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.errors import InvalidRequest, NotFound

MAX_FILES_PER_TENANT = 10_000
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_META, _CONTENT = "meta.json", "content"
_UNFINISHED = re.compile(r"\.[0-9a-f]{24}\.part|\.file-[0-9a-f]{24}")
_ABANDONED_S = 3600.0
"""Since when nothing has been written to what nobody is at any more; to an upload that runs it is every few minutes."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file beside its content."""

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int

    def as_body(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """Owns the folder of files, which other processes may share. Tenants see no files but their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_abandoned(folder, _UNFINISHED)

    def new_path(self) -> Path:
        """Where a file may be written that is then given to `keep`, or removed."""
        return self._folder / f".{secrets.token_hex(12)}.part"

    def check_room(self, tenant: str) -> None:
        """Raise where a tenant may not bring one more file."""
        if sum(1 for _ in self.all_of(tenant)) >= MAX_FILES_PER_TENANT:
            raise InvalidRequest(f"there are {MAX_FILES_PER_TENANT} files already; delete some", param="file")

    def keep(self, path: Path, *, tenant: str, filename: str, purpose: str) -> StoredFile:
        """Take a written file in. Modifies; where that fails, the file stays where it is."""
        found = StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=path.stat().st_size,
            created_at=int(time.time()),
        )
        staged = self._folder / f".{found.id}"
        staged.mkdir(mode=0o700)
        try:
            (staged / _META).write_text(json.dumps(asdict(found)))
            path.replace(staged / _CONTENT)
            staged.replace(self._folder / found.id)
        except OSError:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return found

    def get(self, file_id: str, tenant: str) -> StoredFile:
        """Raises `NotFound` for a file that is not there, or not this tenant's."""
        found = self._read(file_id) if _ID.fullmatch(file_id) else None
        if found is None or found.tenant != tenant:
            raise NotFound(f"No such File object: {file_id[:64]}", param="id")
        return found

    def content(self, file_id: str, tenant: str) -> Path:
        """Where a file's content lies. Raises `NotFound` as `get` does."""
        return self.place_of(self.get(file_id, tenant).id)

    def place_of(self, file_id: str) -> Path:
        """Where the content of a file with that id lies, if there is one."""
        return self._folder / file_id / _CONTENT

    def delete(self, file_id: str, tenant: str) -> None:
        """Remove a file. Modifies; raises `NotFound` as `get` does."""
        shutil.rmtree(self._folder / self.get(file_id, tenant).id, ignore_errors=True)

    def all_of(self, tenant: str) -> Iterator[StoredFile]:
        """A tenant's files, in no order."""
        for entry in os.scandir(self._folder):
            if not entry.name.startswith("."):
                found = self._read(entry.name)
                if found is not None and found.tenant == tenant:
                    yield found

    def _read(self, file_id: str) -> StoredFile | None:
        try:
            return StoredFile(**json.loads((self._folder / file_id / _META).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def remove_abandoned(folder: Path, unfinished: re.Pattern[str]) -> None:
    """Remove what killed processes have left half written in a folder: what is named so, and old. Modifies.

    Other processes may be at work in the folder; whatever cannot be removed stays.
    """
    oldest_s = time.time() - _ABANDONED_S
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            if unfinished.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < oldest_s:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
