"""Runs one command and ends its whole process group when the command, or the process that started us, ends.

``python -m pipeline.engine.guard COMMAND…`` in a new session; standard input is a pipe that the starter holds open.
Unlike PR_SET_PDEATHSIG this also reaches the grandchildren and does not depend on which thread started us.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _end_group_with_starter() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main(command: list[str]) -> None:
    """Run ``command`` with the signals ignored that are for the trainer, until it or the starter ends."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A handler, not SIG_IGN: the command must not inherit it. SIGTERM goes to the group; we leave after the command,
    # which may be told to end at its first step: so the handler comes before it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_group_with_starter, daemon=True).start()
    print(f"engine process ended with exit code {child.wait()}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
