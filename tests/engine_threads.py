"""A scripted engine beside a test that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from pipeline.engine.scripted import FakeEngine


@contextlib.contextmanager
def engine_thread(engine: FakeEngine | None = None) -> Iterator[FakeEngine]:
    """A scripted engine that serves while the test blocks."""
    engine = engine or FakeEngine()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(engine.start(), loop).result(10)
    try:
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
