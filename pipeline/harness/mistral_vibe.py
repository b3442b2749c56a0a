"""Mistral Vibe: files, a shell, and TypeScript that calls further tools; Chat Completions. A native program with a
server in Python."""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Pip

# Its own reserve of 4,096 tokens leaves a small window no room for an answer; the proxy cuts answers to what is left.
CONFIG = """\
active_model = "capture"
enable_telemetry = false
enable_update_checks = false
enable_auto_update = false
output_token_reserve = 0
[[providers]]
name = "capture"
api_base = "$base_url/v1"
api_key_env_var = "CAPTURE_KEY"
api_style = "openai"
backend = "generic"
[[models]]
name = '$model'
provider = "capture"
alias = "capture"
max_context_length = $context_tokens
max_output_tokens = $max_tokens
"""

SPAWN = 'async function main() { return await tools.agents.spawn({name: "helper", message: `$prompt`}) }'

RECIPE = HarnessRecipe(
    name="mistral-vibe",
    version="3.0.2",
    dialect="chat",
    packaging=Pip("mistral-vibe", oldest=(3, 12)),
    argv=(
        "$prefix/bin/python",
        "$prefix/bin/vibe",
        *("-p", "$prompt", "--auto-approve", "--trust", "--output", "streaming"),
    ),
    env={"TERM": "dumb", "CAPTURE_KEY": "$key"},
    home_files={".vibe/config.toml": CONFIG},
    exit_codes={1: "agent_crash", 2: "agent_crash", 3: "call_budget"},
    # no tool_log: it shows what was done, which is less than the calls, or with run_typescript more
    limits={
        "turns": "--max-turns N",
        "wall": "--time-limit SECONDS",
        "tokens": "--max-tokens N",
        "retries": "api_retry_max_elapsed_time = SECONDS in its configuration (300)",
    },
    shell=Action("bash", {"command": "$command"}),
    subagent=Action("run_typescript", {"code": SPAWN}),
    compacts=True,
)
