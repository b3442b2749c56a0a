"""Runs OpenHands' default agent in the directory where it is started:
`openhands.py BASE_URL MODEL CONTEXT_TOKENS MAX_TOKENS TASK`, with the key in LLM_API_KEY.

OpenHands' SDK is a library without a command line. Each event of a tool call is a line of JSON on stdout.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

gc.disable()  # a sixth of the time that these imports take

from openhands.sdk import LLM, Conversation  # noqa: E402
from openhands.sdk.event import ActionEvent  # noqa: E402
from openhands.sdk.event.conversation_error import ConversationErrorEvent  # noqa: E402
from openhands.tools.preset.default import get_default_agent  # noqa: E402

EXITS = {"finished": 0, "stuck": 3}  # by the conversation's last status
CALL_BUDGET = 4


def make_llm(base_url: str, model: str, context_tokens: int, max_tokens: int) -> LLM:
    """The model. The waits before retries are shorter than OpenHands' own 8 to 64 s."""
    return LLM(
        model=f"openai/{model}",
        base_url=f"{base_url}/v1",
        api_key=os.environ.pop("LLM_API_KEY"),  # the agent's commands do not see it
        max_input_tokens=context_tokens - max_tokens,
        max_output_tokens=max_tokens,
        retry_min_wait=1,
        retry_multiplier=1.0,
        retry_max_wait=16,
        usage_id="agent",
    )


def run(base_url: str, model: str, context_tokens: int, max_tokens: int, task: str) -> int:
    """Give ``task`` to the agent and wait until it is done. Returns the exit code."""
    errors: list[str] = []

    def tell(event: Any) -> None:
        if isinstance(event, ActionEvent):
            print(json.dumps({"tool_call": event.tool_name, "id": event.tool_call_id}), flush=True)
        elif isinstance(event, ConversationErrorEvent):
            errors.append(event.code)

    agent = get_default_agent(llm=make_llm(base_url, model, context_tokens, max_tokens), cli_mode=True)
    conversation = Conversation(agent=agent, workspace=os.getcwd(), callbacks=[tell], visualizer=None)
    conversation.send_message(task)
    conversation.run()
    status = conversation.state.execution_status.value
    print(json.dumps({"status": status, "errors": errors}), flush=True)
    conversation.close()
    return CALL_BUDGET if "MaxIterationsReached" in errors else EXITS.get(status, 1)


if __name__ == "__main__":
    gc.enable()
    base_url, model, context_tokens, max_tokens, task = sys.argv[1:]
    sys.exit(run(base_url, model, int(context_tokens), int(max_tokens), task))
