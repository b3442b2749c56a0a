"""Claude Code, whole, and with `--bare`: three tools (Bash, Edit, Read), a short prompt. Anthropic Messages, native."""

import dataclasses

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Npm

RECIPE = HarnessRecipe(
    name="claude-code",
    version="2.1.332",
    dialect="anthropic",
    packaging=Npm("@anthropic-ai/claude-code", native=True),
    argv=(
        "$prefix/node_modules/.bin/claude",
        *("-p", "$prompt", "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"),
    ),
    env={
        "TERM": "dumb",
        "IS_SANDBOX": "1",
        "ANTHROPIC_BASE_URL": "$base_url",
        "ANTHROPIC_API_KEY": "$key",
        "ANTHROPIC_MODEL": "$model",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
        "CLAUDE_CODE_SUBAGENT_MODEL": "$model",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "$context_tokens",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "$max_tokens",
        "DISABLE_PROMPT_CACHING": "1",  # else cache marks move, and no history extends the one before
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_BUG_COMMAND": "1",
    },
    limits={"turns": "CLAUDE_CODE_MAX_TURNS", "retries": "CLAUDE_CODE_MAX_RETRIES"},
    tool_log=r'"type":"tool_use"',
    shell=Action("Bash", {"command": "$command", "description": "run a command"}),
    subagent=Action("Agent", {"description": "help", "prompt": "$prompt", "subagent_type": "general-purpose"}),
    compacts=True,
)

BARE = dataclasses.replace(
    RECIPE, name="claude-code-bare", installation="claude-code", argv=(*RECIPE.argv, "--bare"), subagent=None
)
