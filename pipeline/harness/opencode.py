"""OpenCode: ten tools, Chat Completions. A native program."""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Npm

RECIPE = HarnessRecipe(
    name="opencode",
    version="1.18.33",
    dialect="chat",
    packaging=Npm("opencode-ai", native=True),
    # with a title of its own it asks the model for none
    argv=(
        "$prefix/node_modules/.bin/opencode",
        *("run", "-m", "capture/$model", "--format", "json", "--title", "run"),
    ),
    stdin="$prompt",  # as an argument it would be sent in quotation marks
    env={
        "TERM": "dumb",
        "CAPTURE_KEY": "$key",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    },
    home_files={
        ".config/opencode/opencode.json": {
            "autoupdate": False,
            "share": "disabled",
            "model": "capture/$model",
            "small_model": "capture/$model",
            "enabled_providers": ["capture"],
            "permission": {"*": "allow"},
            "provider": {
                "capture": {
                    "npm": "@ai-sdk/openai-compatible",  # part of the program
                    "name": "capture",
                    "options": {"baseURL": "$base_url/v1", "apiKey": "{env:CAPTURE_KEY}"},
                    "models": {
                        "$model": {
                            "name": "$model",
                            "tool_call": True,
                            "limit": {"context": "$context_tokens", "output": "$max_tokens"},
                        }
                    },
                }
            },
        }
    },
    tool_log=r'"type":"tool_use"',
    shell=Action("bash", {"command": "$command", "description": "run a command"}),
    subagent=Action("task", {"description": "help", "prompt": "$prompt", "subagent_type": "general"}),
    compacts=True,
)
