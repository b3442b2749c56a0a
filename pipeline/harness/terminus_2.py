"""Terminus 2: commands as JSON in the text of its answers, typed into a tmux pane; Chat Completions without tools.

It is a part of harbor, made for containers; `runners/terminus_2.py` lets it work in the sandbox as it is.
"""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Pip

DONE = Action(text='{"analysis": "", "plan": "", "commands": [], "task_complete": true}')

RECIPE = HarnessRecipe(
    name="terminus-2",
    version="0.26.0",
    dialect="chat",
    packaging=Pip("harbor", oldest=(3, 12)),
    programs=("tmux",),
    argv=(
        "$prefix/bin/python",
        "$runners/terminus_2.py",
        *("$base_url", "$model", "$context_tokens", "$max_tokens", "$prompt"),
    ),
    env={
        "TERM": "dumb",
        "OPENAI_API_KEY": "$key",
        "HARBOR_TELEMETRY": "0",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it looks for a list of prices on the network
    },
    exit_codes={1: "agent_crash"},
    tool_log=r"(?m)^Sending keys: ",
    limits={"turns": "max_turns=N, an argument of Terminus2 in its runner"},
    shell=Action(
        text='{"analysis": "", "plan": "", "commands": [{"keystrokes": "$command\\n", "duration": 0.5}]}',
    ),
    finish=(DONE, DONE),  # it asks whether the model is sure
    compacts=True,
)
