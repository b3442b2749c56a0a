"""Gemini CLI: fifteen tools, the Gemini API."""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import WASM_QUICKLY, Npm

STATUSES = tuple(status & 255 for status in (401, 403, 404, 429, 500, 502, 503, 504))
RECIPE = HarnessRecipe(
    name="gemini-cli",
    version="0.61.0",
    dialect="gemini",
    packaging=Npm("@google/gemini-cli"),
    argv=(
        *("$node", WASM_QUICKLY, "$prefix/node_modules/@google/gemini-cli/bundle/gemini.js"),
        *("-p", "$prompt", "-m", "$model", "--yolo", "--output-format", "stream-json"),
    ),
    env={
        "TERM": "dumb",
        "NODE_COMPILE_CACHE": "$prefix/compile-cache",
        "GEMINI_API_KEY": "$key",
        "GOOGLE_GEMINI_BASE_URL": "$base_url",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_CLI_NO_RELAUNCH": "true",  # else it starts itself anew to be allowed half of the machine's memory
    },
    home_files={
        ".gemini/settings.json": {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            # one of its two built-in skills: it lists them in the order in which their files happened to be read
            "skills": {"disabled": ["antigravity-support"]},
        }
    },
    # a failing API ends it with status & 255, a setting that it does not like with a number below 64
    exit_codes={53: "call_budget", 54: "agent_crash"}
    | dict.fromkeys((41, 42, 44, 52, 55, *STATUSES), "infrastructure"),
    loop_guard="Loop detected, stopping execution",
    tool_log=r'"type":"tool_use"',
    warm_up=True,
    shell=Action("run_shell_command", {"command": "$command", "description": "run a command"}),
    limits={"turns": "settings.json: model.maxSessionTurns", "attempts": "settings.json: general.maxAttempts"},
    subagent=Action("invoke_agent", {"agent_name": "generalist", "prompt": "$prompt"}),
)
