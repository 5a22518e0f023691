"""A process that runs a batch with slow stand-ins for router and tokenizer, to be killed.

Usage: `python -m tests.support.batch_child INPUT OUTPUT SEED`. Tells on stdout what it does: `start LINE` when a row's
computation starts, `done LINE` once its line is in the output, `ready` before the first row.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from router.batch import BatchLimits, Row, prepare_batch, run_prepared
from router.requests import Generated, GenerateRequest, RequestTrace
from router.tokenizer import Detokenizer, Tokenizer
from shared.errors import WorkerLost
from shared.hashing import pack_tokens
from shared.types import CacheScheme, FinishReason
from tests.support.batches import MODEL


class ByteTokenizer:
    """UTF-8 bytes as token ids: starts at once, which the real one does not."""

    async def tokens_of(self, *, messages: Sequence[Mapping[str, Any]], **_: Any) -> bytes:
        return pack_tokens(list("".join(message["content"] for message in messages).encode()))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def detokenizer(self, prompt_token_ids: bytes, **_: Any) -> Detokenizer:
        return Detokenizer(lambda token_ids: bytes(token_ids).decode(errors="replace"))


def tell(word: str, line: object = "") -> None:
    sys.stdout.write(f"{word} {line}\n")
    sys.stdout.flush()


async def main(input_path: Path, output_path: Path, rng: random.Random) -> None:
    async def generate(request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        tell("start", request.request.rsplit("-", 1)[-1])
        await asyncio.sleep(rng.uniform(0.0, 0.004))
        if rng.random() < 0.1:
            raise WorkerLost("gone")
        yield Generated((65,))
        yield Generated((66,), FinishReason.LENGTH)

    def note(row: Row, text: str | None, trace: RequestTrace) -> None:
        tell("done", row.line)

    with prepare_batch(input_path, output_path, served_model=MODEL, resume=True) as prepared:
        tell("ready")
        await run_prepared(
            prepared,
            generate=generate,
            tokenizer=cast(Tokenizer, ByteTokenizer()),
            scheme=CacheScheme(MODEL, 16),
            max_model_len_tokens=256,
            rng=rng,
            limits=BatchLimits(max_in_flight=3, max_attempts=1),
            on_row=note,
        )


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), random.Random(sys.argv[3])))
