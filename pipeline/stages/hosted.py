"""A model at a URL: any Chat Completions API, as the upstream of the proxy in text mode; it is asked once at the start.

Of its key only the name of the environment variable is ever kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from pipeline.capture.control import UPSTREAM_KEY
from pipeline.capture.text import api_base, trusts_environment
from pipeline.config import CollectConfig, StageConfig, UserError

GREET_S = 60.0
BUSY = 429
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "noop",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {}},
    },
}
SHOWN = 200  # characters of a server's complaint


@dataclass(frozen=True)
class HostedModel:
    """Where it is, and which settings say so: ``PREFIX_url``, ``PREFIX_model``, and the variable of its key."""

    url: str
    model: str
    prefix: str
    key_setting: str
    key_env: str

    @property
    def key(self) -> str | None:
        """Its API key; None where the environment holds none."""
        return os.environ.get(self.key_env) or None

    @property
    def name(self) -> str:
        """What tells it from every other one."""
        return f"{self.model} at {self.url}"


def teacher_model(collect: CollectConfig) -> HostedModel | None:
    """The teacher at a URL, if the settings name one."""
    if collect.teacher_url is None:
        return None
    return HostedModel(
        collect.teacher_url, collect.teacher_model, "collect.teacher", "collect.api_key_env", collect.api_key_env
    )


def evaluated_model(stage: StageConfig) -> HostedModel | None:
    """The model that `yoke evaluate stage.api_url=…` is about, if it is about one.

    Raises UserError for half of the settings, a wrong URL, or a key that is named and not there.
    """
    if stage.api_url is None:
        if stage.api_model is not None or stage.api_key_env is not None:
            raise UserError("stage.api_model and stage.api_key_env belong to stage.api_url=https://…: give that too")
        return None
    if not stage.api_model:
        raise UserError(f"stage.api_url={stage.api_url} needs stage.api_model=NAME, as the API calls the model")
    found = HostedModel(
        stage.api_url.rstrip("/"), stage.api_model, "stage.api", "stage.api_key_env", stage.api_key_env or UPSTREAM_KEY
    )
    check_url(found)
    if stage.api_key_env and found.key is None:
        raise UserError(f"stage.api_key_env={stage.api_key_env}: the environment has no such variable, or it is empty")
    return found


def check_url(hosted: HostedModel) -> None:
    """Raises UserError for what is no URL of a server, or holds a password: what is recorded of a run keeps it."""
    place = urlsplit(hosted.url)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise UserError(f"{hosted.prefix}_url={hosted.url} is no http(s) address, such as https://host/v1")
    if place.username or place.password or place.query:
        raise UserError(
            f"{hosted.prefix}_url must hold no password or key (host {place.hostname}): put the key into an "
            f"environment variable and name that with {hosted.key_setting}=…"
        )


async def greet(hosted: HostedModel, more: Mapping[str, object] | None = None) -> None:
    """One short request with a tool, and with the fields ``more``. A busy server counts as one that answers.

    Raises UserError when the model does not answer it: no rollout could go well.
    """
    url, key = hosted.url, hosted.key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {
        "model": hosted.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [PROBE_TOOL],
        "max_tokens": 16,
        **(more or {}),
    }
    try:
        async with httpx.AsyncClient(trust_env=trusts_environment(url), timeout=GREET_S) as client:
            reply = await client.post(f"{api_base(url)}/chat/completions", headers=headers, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"{hosted.prefix}_url={url}: no answer ({error or type(error).__name__})") from error
    if reply.status_code in (401, 403):
        told = f"the key in {hosted.key_env}" if key else f"a request without a key ({hosted.key_env} is empty)"
        raise UserError(f"{hosted.prefix}_url={url} refuses {told} (status {reply.status_code})")
    if reply.status_code != BUSY and (reply.status_code != 200 or not _has_choices(reply)):
        raise UserError(
            f"{hosted.prefix}_url={url} does not serve {hosted.prefix}_model={hosted.model} with tools "
            f"(status {reply.status_code}): {_complaint(reply, key)}"
        )


def _has_choices(reply: httpx.Response) -> bool:
    try:
        return bool(reply.json()["choices"])
    except (ValueError, KeyError, TypeError):
        return False


def _complaint(reply: httpx.Response, key: str | None) -> str:
    """In one line; some servers repeat the key in it."""
    try:
        text = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = reply.text
    line = " ".join(str(text).split())
    return (line.replace(key, "…") if key else line)[:SHOWN] or "an empty reply"
