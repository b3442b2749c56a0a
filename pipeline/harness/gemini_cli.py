"""Gemini CLI: fifteen tools, the Gemini API."""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Npm

RECIPE = HarnessRecipe(
    name="gemini-cli",
    version="0.61.0",
    dialect="gemini",
    packaging=Npm("@google/gemini-cli"),
    argv=(
        *("$node", "$prefix/node_modules/@google/gemini-cli/bundle/gemini.js"),
        *("-p", "$prompt", "-m", "$model", "--yolo", "--output-format", "stream-json"),
    ),
    env={
        "TERM": "dumb",
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
        }
    },
    exit_codes={53: "call_budget"},
    loop_guard="Loop detected",
    tool_log=r'"type":"tool_use"',
    shell=Action("run_shell_command", {"command": "$command", "description": "run a command"}),
    subagent=Action("invoke_agent", {"agent_name": "generalist", "prompt": "$prompt"}),
    compacts=True,
)
