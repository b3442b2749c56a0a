"""Codex: a shell, a plan of goals and sub-agents; OpenAI Responses. A native program that a script of Node becomes."""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Npm

CONFIG = """\
model_provider = "capture"
model_context_window = $context_tokens
check_for_update_on_startup = false
[features]
plugins = false
[model_providers.capture]
name = "capture"
base_url = "$base_url/v1"
env_key = "CAPTURE_KEY"
wire_api = "responses"
[analytics]
enabled = false
[feedback]
enabled = false
"""

RECIPE = HarnessRecipe(
    name="codex",
    version="0.171.0",
    dialect="responses",
    packaging=Npm("@openai/codex"),
    argv=(
        *("$node", "$prefix/node_modules/@openai/codex/bin/codex.js", "exec", "--json", "-m", "$model"),
        *("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "$prompt"),
    ),
    env={"TERM": "dumb", "CAPTURE_KEY": "$key"},
    home_files={".codex/config.toml": CONFIG},
    # it shows no goals that are set and no input to commands that run
    tool_log=r'"type":"item.started","item":{"id":"\w+","type":"(command_execution|collab_tool_call)"|router: error=',
    shell=Action("exec_command", {"cmd": "$command"}),
    subagent=Action("spawn_agent", {"message": "$prompt"}, namespace="multi_agent_v1"),
    limits={"retries": "-c model_providers.capture.request_max_retries=N -c …stream_max_retries=N"},
    compacts=True,
)
