"""Real `vllm serve` processes, CPU build, tiny model: started, killed and started again at the same addresses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

START_TIMEOUT_S = 300.0
BLOCK_SIZE = 32
CONTEXT_TOKENS = 1024
# The console script looks for a distribution `vllm`, which the CPU build is not; it runs this module.
_MODULE = "vllm.entrypoints.openai.api_server"
_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclass
class ServerProcess:
    """One server and its addresses; the process may change."""

    model_dir: Path
    log: Path
    port: int
    events_port: int
    replay_port: int
    num_blocks: int = 512
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def attach(self) -> str:
        return (
            f"{self.url},events=tcp://127.0.0.1:{self.events_port},replay=tcp://127.0.0.1:{self.replay_port}"
            ",max-num-seqs=8"
        )

    def start(self) -> None:
        """Begin to start; `ready` waits for it."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": "kv@test",
        }
        flags = {
            "--model": str(self.model_dir),
            "--served-model-name": "tiny",
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--dtype": "float32",
            "--kv-cache-memory-bytes": str(self.num_blocks * BLOCK_SIZE * 512),
            "--block-size": str(BLOCK_SIZE),
            "--max-model-len": str(CONTEXT_TOKENS),
            "--max-num-seqs": "8",
            "--distributed-executor-backend": _EXECUTOR,
            "--kv-events-config": json.dumps(events),
        }
        command = [sys.executable, "-m", _MODULE, "--enforce-eager", "--enable-prompt-tokens-details"]
        command += [word for flag in flags.items() for word in flag]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",
            **self.environment,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    async def ready(self) -> None:
        """Wait until it answers. Fails with its log if it ends."""
        async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
            while True:
                assert self.process is not None
                assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
                try:
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.2)

    async def num_requests(self) -> float:
        """Requests that it has under way, by its own metrics."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))

    def kill(self) -> None:
        """kill -9 of the server and the engine's process."""
        if self.process is not None:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
