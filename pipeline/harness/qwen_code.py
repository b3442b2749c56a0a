"""Qwen Code: fourteen tools and more on request, Chat Completions."""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import WASM_QUICKLY, Npm

RECIPE = HarnessRecipe(
    name="qwen-code",
    version="0.24.4",
    dialect="chat",
    packaging=Npm("@qwen-code/qwen-code"),
    argv=(
        # what its cli-entry.js starts, which passes on no flags of Node
        *("$node", "--expose-gc", WASM_QUICKLY, "$prefix/node_modules/@qwen-code/qwen-code/cli.js"),
        *("-p", "$prompt", "-m", "$model", "--auth-type", "openai", "--yolo", "--output-format", "stream-json"),
    ),
    env={
        "TERM": "dumb",
        "NODE_COMPILE_CACHE": "$prefix/compile-cache",
        "OPENAI_API_KEY": "$key",
        "OPENAI_BASE_URL": "$base_url/v1",
        "OPENAI_MODEL": "$model",
        "QWEN_CODE_MAX_OUTPUT_TOKENS": "$max_tokens",
        "QWEN_CODE_NO_RELAUNCH": "true",  # else it starts itself anew to be allowed half of the machine's memory
        "QWEN_CODE_API_TIMEOUT_MS": "0",  # else it gives up an answer after two minutes and asks again
    },
    home_files={
        ".qwen/settings.json": {
            "security": {"auth": {"selectedType": "openai"}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": {"generationConfig": {"contextWindowSize": "$context_tokens"}},
            "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
        }
    },
    exit_codes={53: "call_budget", 55: "call_budget"} | dict.fromkeys((42, 44, 52), "infrastructure"),
    loop_guard="Loop detection halted the run",
    tool_log=r'"type":"tool_use"',
    warm_up=True,
    shell=Action("run_shell_command", {"command": "$command", "description": "run a command", "is_background": False}),
    limits={"turns": "--max-session-turns N", "tool calls": "--max-tool-calls N", "seconds": "--max-wall-time N"},
    subagent=Action("agent", {"description": "help", "prompt": "$prompt", "subagent_type": "general-purpose"}),
    compacts=True,
)
