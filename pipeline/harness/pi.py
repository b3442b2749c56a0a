"""Pi: four tools (read, bash, edit, write), a short prompt, Chat Completions."""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Npm

RECIPE = HarnessRecipe(
    name="pi",
    version="1.6.0",
    dialect="chat",
    packaging=Npm("@earendil-works/pi-coding-agent"),
    argv=(
        "$node",
        "$prefix/node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js",
        *("-p", "$prompt", "--provider", "capture", "--model", "$model", "--mode", "json", "--no-session"),
    ),
    env={
        "TERM": "dumb",
        "PI_OFFLINE": "1",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
        "NODE_COMPILE_CACHE": "$prefix/compile-cache",
    },
    home_files={
        # it compacts when less than an answer's room is left, and keeps as much of the end as it was
        ".pi/agent/settings.json": {"compaction": {"reserveTokens": "$max_tokens", "keepRecentTokens": "$max_tokens"}},
        ".pi/agent/models.json": {
            "providers": {
                "capture": {
                    "baseUrl": "$base_url/v1",
                    "api": "openai-completions",
                    "apiKey": "$key",
                    "models": [
                        {
                            "id": "$model",
                            "name": "$model",
                            "reasoning": False,
                            "input": ["text"],
                            "contextWindow": "$context_tokens",
                            "maxTokens": "$max_tokens",
                            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                        }
                    ],
                }
            }
        },
    },
    warm_up=True,
    limits={"retries": ".pi/agent/settings.json: retry.maxRetries"},
    tool_log=r'"type":"tool_execution_end"',
    shell=Action("bash", {"command": "$command"}),
    compacts=True,
)
