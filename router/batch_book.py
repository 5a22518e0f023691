"""Records of the batches that were asked for over HTTP, on disk, so that a restart goes on with them.

Methods block and belong into threads. Whoever runs a batch is the only one that writes its record once it is there;
that it is to be cancelled is said by a mark beside it.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from router.openai import Endpoint
from router.stored_files import remove_abandoned
from shared.errors import InvalidRequest, NotFound

WINDOW_S = 24 * 3600
_ID = re.compile(r"batch_[0-9a-f]{24}")
_UNFINISHED = re.compile(_ID.pattern + r"\.[0-9a-f]{8}")
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
"""States that end by themselves."""


@dataclass(slots=True)
class BatchRecord:
    """One batch. Times are in Unix seconds."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    status_to_time: dict[str, int] = field(default_factory=dict)
    """When each state began."""
    errors: list[str] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0

    def become(self, status: str) -> None:
        """Enter a state. Modifies."""
        self.status = status
        self.status_to_time[status] = int(time.time())

    def as_body(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        told = [{"code": "invalid_input", "message": text, "param": None, "line": None} for text in self.errors]
        states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": told} if told else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{state}_at": self.status_to_time.get(state) for state in states},
            "request_counts": {"total": self.num_total, "completed": self.num_completed, "failed": self.num_failed},
            "metadata": self.metadata,
        }


class BatchBook:
    """Owns the folder of records and of results under way. Tenants see no batches but their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_abandoned(folder, _UNFINISHED)

    def create(
        self, tenant: str, endpoint: Endpoint, input_file_id: str, metadata: dict[str, str] | None
    ) -> BatchRecord:
        """A new batch, for whoever runs them to find. Modifies."""
        now = int(time.time())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=tenant,
            endpoint=endpoint.value,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=metadata,
        )
        self.write(record)
        return record

    def write(self, record: BatchRecord) -> None:
        """Put a record on the disk, whole or not at all. Modifies."""
        path = self.folder / f"{record.id}.json"
        staged = path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            staged.write_text(json.dumps(asdict(record)))
            staged.replace(path)
        except OSError:
            staged.unlink(missing_ok=True)
            raise

    def get(self, batch_id: str, tenant: str) -> BatchRecord:
        """Raises `NotFound` for a batch that is not there, or not this tenant's."""
        record = self.read(batch_id) if _ID.fullmatch(batch_id) else None
        if record is None or record.tenant != tenant:
            raise NotFound(f"No such Batch object: {batch_id[:64]}", param="batch_id")
        return record

    def cancel(self, batch_id: str, tenant: str) -> BatchRecord:
        """Have a batch end early. Modifies; raises `NotFound`, and `InvalidRequest` for one that has ended."""
        record = self.get(batch_id, tenant)
        if record.status not in RUNNING:
            raise InvalidRequest(f"Cannot cancel a batch with status '{record.status}'.", param="batch_id")
        self.cancel_mark(batch_id).touch()
        return self.get(batch_id, tenant)

    def cancel_mark(self, batch_id: str) -> Path:
        """The file that says that a batch is to be cancelled."""
        return self.folder / f"{batch_id}.cancel"

    def results(self, batch_id: str) -> Path:
        """Where a batch's results are gathered, which is its journal."""
        return self.folder / f"{batch_id}.jsonl"

    def ids(self) -> Iterator[str]:
        """Every batch there is, in no order."""
        return (path.stem for path in self.folder.glob("batch_*.json"))

    def all_of(self, tenant: str) -> list[BatchRecord]:
        """A tenant's batches, newest first."""
        found = [record for one in self.ids() if (record := self.read(one)) is not None and record.tenant == tenant]
        return _newest_first(found)

    def newest(self, most: int) -> list[BatchRecord]:
        """The batches of all tenants that were written last, newest first; of all others nothing is read."""
        written = []
        for path in self.folder.glob("batch_*.json"):
            with contextlib.suppress(FileNotFoundError):
                written.append((path.stat().st_mtime, path.stem))
        records = [self.read(batch_id) for _, batch_id in sorted(written, reverse=True)[:most]]
        return _newest_first(record for record in records if record is not None)

    def read(self, batch_id: str) -> BatchRecord | None:
        """A record as it is now; `None` where there is none."""
        try:
            record = BatchRecord(**json.loads((self.folder / f"{batch_id}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
        if record.status in ("validating", "in_progress") and self.cancel_mark(batch_id).exists():
            record.become("cancelling")
        return record


def _newest_first(records: Iterable[BatchRecord]) -> list[BatchRecord]:
    return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)
