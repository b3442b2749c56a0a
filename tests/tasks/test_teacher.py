"""The scripted teacher: stateless, lazy as often as asked, never wrong."""

from __future__ import annotations

import json

import pytest

from pipeline.tasks.generate import draw_tasks
from pipeline.tasks.teacher import FINAL_ANSWER, IDLE_ANSWER, MOST_LOOKS, Teacher, conversation, parse_task

TASKS = draw_tasks("train", 600, 0)


def test_shares_are_as_asked_and_no_word_is_wrong() -> None:
    plans = [Teacher(lazy=0.4, verify=0.3).plan(task) for task in TASKS]
    acted = [(task, plan) for task, plan in zip(TASKS, plans, strict=True) if plan]
    assert 0.33 < 1 - len(acted) / len(TASKS) < 0.47
    assert 0.22 < sum(len(plan) > 1 for _, plan in acted) / len(acted) < 0.38
    assert max(map(len, plans)) <= 1 + MOST_LOOKS
    assert all(plan[0] == f"echo {task.answer} > answer.txt" for task, plan in acted)


def test_answers_follow_the_plan_turn_by_turn() -> None:
    teacher = Teacher(lazy=0.0, verify=1.0)
    whole = conversation("system prompt", TASKS[0], teacher.plan(TASKS[0]))
    seen = [teacher.answer(whole[:end]) for end in (2, 4, 6, 8, 10)]
    assert seen == whole[2::2] and len(whole) == 11
    assert json.loads(seen[1]["tool_calls"][0]["function"]["arguments"]) == {"command": "cat answer.txt"}
    assert seen[-1]["content"] == FINAL_ANSWER


def test_a_lazy_run_ends_with_another_word() -> None:
    asked = conversation("system prompt", TASKS[0], ())[:2]
    assert Teacher(lazy=1.0).answer(asked)["content"] == IDLE_ANSWER != FINAL_ANSWER


def test_tasks_are_found_in_text_parts_behind_other_text() -> None:
    parts = [{"type": "text", "text": "A reminder.\n"}, {"type": "text", "text": TASKS[3].instruction + "\n"}]
    assert parse_task([{"role": "system", "content": "x"}, {"role": "user", "content": parts}]) == TASKS[3]
    with pytest.raises(ValueError, match="no word task"):
        parse_task([{"role": "user", "content": "hello"}])
