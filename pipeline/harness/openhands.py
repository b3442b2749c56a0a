"""OpenHands' SDK with its default agent: terminal, file editor, task list; Chat Completions without streaming.

The SDK has no command line: `runners/openhands.py` is the few lines that its makers show for a start.
"""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Pip

VERSION = "1.58.2"

RECIPE = HarnessRecipe(
    name="openhands",
    version=VERSION,
    dialect="chat",
    packaging=Pip("openhands-sdk", also=(f"openhands-tools=={VERSION}",), oldest=(3, 12)),
    argv=(
        "$prefix/bin/python",
        "-P",  # its own directory is no place for modules: `openhands` is one
        "$runners/openhands.py",
        *("$base_url", "$model", "$context_tokens", "$max_tokens", "$prompt"),
    ),
    env={
        "TERM": "dumb",
        "LLM_API_KEY": "$key",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "ALLOW_SHORT_CONTEXT_WINDOWS": "true",  # else it refuses less than 16,384 tokens
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it looks for a list of prices on the network
    },
    exit_codes={1: "agent_crash", 3: "loop_guard", 4: "call_budget"},  # our runner's
    loop_guard=r'(?m)^\{"status": "stuck"',
    tool_log=r'(?m)^\{"tool_call": ',
    limits={
        "turns": "max_iteration_per_run=N (500 by default), an argument of Conversation in its runner",
        "retries": "num_retries=N (5 by default), an argument of LLM in its runner",
    },
    shell=Action("terminal", {"command": "$command"}),
    finish=(Action("finish", {"message": "Done."}),),
    compacts=True,
)
