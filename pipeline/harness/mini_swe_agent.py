"""mini-SWE-agent: one tool (bash), a short prompt, Chat Completions without streaming; it never compacts."""

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Pip

RECIPE = HarnessRecipe(
    name="mini-swe-agent",
    version="2.4.6",
    dialect="chat",
    packaging=Pip("mini-swe-agent"),
    argv=(
        "$prefix/bin/python",
        "$prefix/bin/mini",
        *("-m", "openai/$model", "-t", "$prompt", "-y", "-l", "0", "--exit-immediately"),
    ),
    env={
        "TERM": "dumb",
        "OPENAI_API_KEY": "$key",
        "OPENAI_API_BASE": "$base_url/v1",
        "MSWEA_CONFIGURED": "true",  # else it asks for a model first
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",  # our model has no price
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it looks for a list of prices on the network
    },
    exit_codes={1: "agent_crash"},  # 0 also at its own limits, and after too many bad answers
    loop_guard=r"(?m)^RepeatedFormatError$",  # three answers in a row without a good tool call
    # each result that it shows, and each call that it drops as malformed
    tool_log=r"(?m)^(?:<returncode>$|Error parsing tool call arguments|Unknown tool '|Missing 'command' argument)",
    limits={
        "turns": "-c mini.yaml -c agent.step_limit=N",
        "wall": "-c mini.yaml -c agent.wall_time_limit_seconds=N",
        "retries": "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=N",
    },
    shell=Action("bash", {"command": "$command"}),
    finish=(Action("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),),
)
