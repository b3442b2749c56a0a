"""Runs Terminus 2 in the directory where it is started: `terminus_2.py BASE_URL MODEL CONTEXT_TOKENS MAX_TOKENS TASK`.

The agent is harbor's own; what is ours is the environment that it works in: this machine, which is the sandbox already.
The key is in OPENAI_API_KEY, where the agent's commands do not see it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import sys
from pathlib import Path

gc.disable()  # a sixth of the time that these imports take

from harbor.agents.terminus_2.terminus_2 import Terminus2  # noqa: E402
from harbor.environments.base import BaseEnvironment, ExecResult  # noqa: E402
from harbor.models.agent.context import AgentContext  # noqa: E402
from harbor.models.task.config import EnvironmentConfig  # noqa: E402
from harbor.models.trial.paths import TrialPaths  # noqa: E402
from harbor.utils.logger import logger  # noqa: E402

FREE_TOKENS = 8000  # Terminus summarises its history when the window has less left
SETTLE_S = 20.0
SEEN = ("PATH", "HOME", "LANG", "TERM", "TMPDIR")  # of our environment, by the agent's commands


class ThisMachine(BaseEnvironment):
    """Runs commands as plain subprocesses in the current directory; tmux has a server of its own below HOME."""

    @staticmethod
    def type() -> str:
        """See BaseEnvironment.type."""
        return "this-machine"

    def _validate_definition(self) -> None:
        """There is nothing to build."""

    async def start(self, force_build: bool) -> None:
        """See BaseEnvironment.start."""
        sockets = Path.home() / "tmux"
        sockets.mkdir(exist_ok=True)
        self._variables = {name: os.environ[name] for name in SEEN if name in os.environ}
        self._variables["TMUX_TMPDIR"] = str(sockets)

    async def settle(self) -> None:
        """Wait for the shell's prompt, which is in the agent's first message or not, as the machine is fast or slow."""
        for _ in range(int(SETTLE_S / 0.05)):
            if ((await self.exec(f"tmux capture-pane -p -t {Terminus2.name()}")).stdout or "").strip():
                return
            await asyncio.sleep(0.05)

    async def stop(self, delete: bool) -> None:
        """See BaseEnvironment.stop."""
        await self.exec("tmux kill-server")

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """See BaseEnvironment.exec. There is only one user."""
        variables = {**self._variables, **(env or {})}
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *("bash", "-c", command), cwd=cwd, env=variables, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        try:
            out, err = await asyncio.wait_for(child.communicate(), timeout_sec)
        except TimeoutError:
            child.kill()
            await child.wait()
            return ExecResult(stdout="", stderr=f"not ended within {timeout_sec} s", return_code=124)
        words = [stream.decode(errors="replace") for stream in (out, err)]
        return ExecResult(stdout=words[0], stderr=words[1], return_code=child.returncode or 0)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """See BaseEnvironment.upload_file."""
        shutil.copy(source_path, target_path)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """See BaseEnvironment.download_file."""
        shutil.copy(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """See BaseEnvironment.upload_dir."""
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """See BaseEnvironment.download_dir."""
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)


def make_agent(base_url: str, model: str, context_tokens: int, max_tokens: int, logs: Path) -> Terminus2:
    """Terminus for a model that no price list knows."""
    prompt_tokens = context_tokens - max_tokens
    return Terminus2(
        logs_dir=logs,
        model_name=f"openai/{model}",
        api_base=f"{base_url}/v1",
        model_info={
            "max_input_tokens": prompt_tokens,
            "max_output_tokens": max_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        },
        proactive_summarization_threshold=min(FREE_TOKENS, prompt_tokens // 4),
        record_terminal_session=False,  # else it downloads a recorder
    )


async def run(base_url: str, model: str, context_tokens: int, max_tokens: int, task: str) -> None:
    """Give ``task`` to the agent and wait until it is done."""
    trial = Path.home() / "trial"
    logs = trial / "agent"
    logs.mkdir(parents=True)
    machine = ThisMachine(
        environment_dir=trial,
        environment_name="sandbox",
        session_id="sandbox",
        trial_paths=TrialPaths(trial_dir=trial),
        task_env_config=EnvironmentConfig(),
    )
    agent = make_agent(base_url, model, context_tokens, max_tokens, logs)
    await machine.start(force_build=False)
    try:
        await agent.setup(machine)
        await machine.settle()
        await agent.run(task, machine, AgentContext())
    finally:
        await machine.stop(delete=True)


if __name__ == "__main__":
    gc.enable()
    logger.addHandler(logging.StreamHandler(sys.stdout))  # says of each command that it is sent
    base_url, model, context_tokens, max_tokens, task = sys.argv[1:]
    asyncio.run(run(base_url, model, int(context_tokens), int(max_tokens), task))
