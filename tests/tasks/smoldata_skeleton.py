"""Made-up tasks in the layout of SmolDataEnvs: the answer in task.toml, where the verifier's environment has it too."""

from __future__ import annotations

from pathlib import Path

TOML = """\
schema_version = "1.2"
artifacts = []
[task]
name = "made-up/{name}"
authors = []
[metadata]
source_row_id = "{notebook}_qa_{number}"
kaggle_dataset_name = "{dataset}"
gold_answer = "{answer}"
reward_mode_initial = "exact_short"
difficulty_level = "{level}"
[environment]
cpus = 1
memory_mb = 4096
mcp_servers = []
[environment.env]
BUCKET_PREFIX = "made__up"
[verifier]
timeout_sec = 20.0
[verifier.env]
EXPECTED_ANSWER = "{answer}"
REWARD_MODE = "exact_short"
OPENAI_API_KEY = "${{OPENAI_API_KEY}}"
[agent]
timeout_sec = 60.0
[solution.env]
"""
GRADER = """\
import json, os, pathlib
answer = pathlib.Path("answer.txt")
right = answer.is_file() and answer.read_text().strip() == os.environ["EXPECTED_ANSWER"]
place = pathlib.Path(os.environ["LOGS"])
place.mkdir(parents=True, exist_ok=True)
(place / "reward.json").write_text(json.dumps({"reward": float(right), "tool_efficiency": None}))
"""
PULL = "# fetches the data before the agent starts\nprint('nothing to fetch')\n"


def make_task(
    root: Path,
    notebook: str = "0001/2.ipynb",
    number: int = 1,
    level: str = "medium",
    dataset: str = "nobody/nothing",
    answer: str = "seventeen boxes",
) -> Path:
    """A task below root/tasks, named after its notebook and number."""
    name = f"{notebook.replace('/', '_').removesuffix('.ipynb')}_qa_{number}"
    path = root / "tasks" / name
    files = {
        "task.toml": TOML.format(
            name=name, notebook=notebook, number=number, level=level, dataset=dataset, answer=answer
        ),
        "instruction.md": f"How many boxes does question {number} of {notebook} ask for? Write it to answer.txt.\n",
        "environment/Dockerfile": "FROM scratch\nCOPY pull_bucket.py /opt/pull_bucket.py\n",
        "environment/pull_bucket.py": PULL,
        "tests/grader.py": GRADER,
        "tests/test.sh": "#!/bin/bash\nexport LOGS=/logs/verifier\npython3 /tests/grader.py\n",
    }
    for relative, text in files.items():
        (path / relative).parent.mkdir(parents=True, exist_ok=True)
        (path / relative).write_text(text)
    return path
