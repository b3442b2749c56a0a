"""Aider: no tools, it edits files by search/replace blocks in the text of its answers; Chat Completions."""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Pip

SETTINGS = {
    "model": "openai/$model",
    "weak-model": "openai/$model",  # else another one writes its summaries
    "edit-format": "diff",
    "yes-always": True,
    "suggest-shell-commands": False,  # with yes-always it asks for commands, and never runs them
    "auto-commits": False,  # else the model is asked for messages
    "dirty-commits": False,
    "gitignore": False,
    "max-chat-history-tokens": "$context_tokens",  # else it may ask for a summary when the work is done
    "detect-urls": False,  # else it fetches those in the task
    "disable-playwright": True,
    "analytics-disable": True,
    "check-update": False,
    "show-release-notes": False,
    "show-model-warnings": False,
    "pretty": False,
    "chat-history-file": "/tmp/aider.chat.md",  # by default both lie in the workspace
    "input-history-file": "/tmp/aider.input",
}
MODEL = {
    "litellm_provider": "openai",
    "mode": "chat",
    "max_tokens": "$max_tokens",
    "max_input_tokens": "$context_tokens",
    "max_output_tokens": "$max_tokens",
    "input_cost_per_token": 0,
    "output_cost_per_token": 0,
}

RECIPE = HarnessRecipe(
    name="aider",
    version="0.86.2",
    dialect="chat",
    packaging=Pip("aider-chat", oldest=(3, 11), newest=(3, 12)),
    argv=("$prefix/bin/python", "$prefix/bin/aider", "--message", "$prompt"),
    env={
        "OPENAI_API_BASE": "$base_url/v1",
        "OPENAI_API_KEY": "$key",
        "TERM": "dumb",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it looks for a list of prices on the network
    },
    home_files={
        ".aider.conf.yml": SETTINGS,  # JSON is YAML
        ".aider.model.metadata.json": {"openai/$model": MODEL},  # else it looks for a list on the network
    },
    loop_guard=r"(?m)^Only \d+ reflections allowed, stopping",
    tool_log=r"(?m)^Applied edit to ",
    write=Action(text="$path\n```\n<<<<<<< SEARCH\n=======\n$content\n>>>>>>> REPLACE\n```\n"),
    finish=(),  # an answer with edits is its last
)
