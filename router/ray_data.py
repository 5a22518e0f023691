"""Ray Data over routed workers: the prompts of a dataset, answered as the rows of a batch are.

Starts no workers: those of `kvroute up` or attached servers run already.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from router import runfile
from router.batch import prepare_batch
from router.batch_job import run_rows
from router.openai import Endpoint
from router.runfile import Run
from router.serving import Serving
from router.workers import Workers, find_workers, serving_of, with_run
from shared.config import Settings
from shared.errors import ConfigError, InvalidRequest

logger = logging.getLogger(__name__)

ToBody = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Makes a row's request body, with `messages` or a `prompt`; the model may be left out."""
ANSWER_COLUMNS = ("answer", "error", "prompt_tokens", "completion_tokens", "cached_tokens")
DEFAULT_WINDOW_ROWS = 4096


def map_prompts(
    dataset: Dataset,
    to_body: ToBody,
    settings: Settings | None = None,
    *,
    window_rows: int = DEFAULT_WINDOW_ROWS,
    num_routers: int = 1,
) -> Dataset:
    """The dataset with a column for each of `ANSWER_COLUMNS`, computed when it is read, as by `map_batches`.

        answered = map_prompts(dataset, lambda row: {"prompt": row["text"], "max_tokens": 64})

    Rows are answered on the workers of `kvroute up` or, by `settings`, on attached servers. Each window of rows is run
    as one batch, so that what its rows share is computed once; several routers each take windows of their own. A row
    that fails has no `answer`, and says why in `error`; the others go on.

    Raises:
        ConfigError: nothing is running.
    """
    settings = settings or Settings.model_validate({})
    run = None if settings.attach else runfile.running(settings.run_dir or runfile.default_run_dir())
    return dataset.map_batches(
        _Prompts,
        fn_constructor_args=(_order(with_run(settings, run), run), to_body),
        batch_size=window_rows,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=num_routers),
        # A router waits most of the time; CPUs of the cluster may all be set aside for workers.
        num_cpus=0,
    )


def _order(settings: Settings, run: Run | None) -> dict[str, Any]:
    """What an actor needs to serve. It holds secrets, and goes the way that those of workers go."""
    fields = settings.model_dump(mode="json", exclude_unset=True)
    for name in {"api_key", "attach_api_key"} & fields.keys():
        fields[name] = getattr(settings, name).get_secret_value()
    return {"settings": fields, "run": None if run is None else dataclasses.asdict(run)}


class _Prompts:
    """A router in an actor of Ray Data, with an event loop of its own that runs for as long as the actor lives."""

    def __init__(self, order: Mapping[str, Any], to_body: ToBody) -> None:
        self._to_body = to_body
        self._loop = asyncio.new_event_loop()
        self._entered = contextlib.AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)
        self._thread.start()
        self._serving = self._wait_for(self._serve(order))

    def __call__(self, table: pa.Table) -> pa.Table:
        taken = sorted(set(ANSWER_COLUMNS) & set(table.column_names))
        if taken:
            raise ConfigError(f"the dataset has columns named {', '.join(taken)}, which answers would go to")
        bodies = [self._to_body(row) for row in table.to_pylist()]
        answers: list[dict[str, Any]] = []
        # A window may be empty, where a filter came before; a batch may not.
        if bodies:
            with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
                answers = self._wait_for(self._answer(bodies, Path(folder)))
        columns = {name: [answer[name] for answer in answers] for name in ANSWER_COLUMNS}
        for name, values in columns.items():
            kind = pa.string() if name in ("answer", "error") else pa.int64()
            table = table.append_column(name, pa.array(values, kind))
        return table

    def close(self) -> None:
        """Leave the workers. An actor that just ends does not: they take that as the end of any process."""
        self._wait_for(self._entered.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait_for(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, order: Mapping[str, Any]) -> Serving:
        settings = Settings(**order["settings"])
        if order["run"] is None:
            workers = await find_workers(settings, Path(), logger.info)
        else:
            fields = order["run"]
            workers = Workers(settings, Run(**{**fields, "workers": tuple(fields["workers"])}))
        return await self._entered.enter_async_context(serving_of(workers, logger.info))

    async def _answer(self, bodies: list[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
        """Answers in the order of the bodies."""
        model = self._serving.settings.model_name
        rows = (_row(number, {"model": model, **body}) for number, body in enumerate(bodies))
        await asyncio.to_thread((folder / "in.jsonl").write_text, "".join(json.dumps(row) + "\n" for row in rows))
        prepared = await asyncio.to_thread(
            prepare_batch, folder / "in.jsonl", folder / "out.jsonl", served_model=model, resume=False
        )
        with prepared:
            await run_rows(self._serving, prepared, progress=False)
        with (folder / "out.jsonl").open() as lines:
            records = map(json.loads, lines)
            answers = {int(record["custom_id"]): _columns(record) for record in records}
        return [answers[number] for number in range(len(bodies))]


def _row(number: int, body: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(body, Mapping) or ("messages" in body) == ("prompt" in body):
        raise InvalidRequest("the body of a request must have either 'messages' or a 'prompt'")
    endpoint = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS
    return {"custom_id": str(number), "method": "POST", "url": endpoint, "body": body}


def _columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into the columns of the row that a record answers."""
    if record["error"] is not None:
        return {**dict.fromkeys(ANSWER_COLUMNS), "error": f"{record['error']['code']}: {record['error']['message']}"}
    body = record["response"]["body"]
    choice, usage = body["choices"][0], body["usage"]
    return {
        "answer": choice["message"]["content"] if "message" in choice else choice["text"],
        "error": None,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }
