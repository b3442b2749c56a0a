"""Which texts hold a credential, and that a find never tells it."""

from __future__ import annotations

import pytest

from pipeline.stages.credentials import FORMS, CredentialFilter

# Made up, and in two pieces each, so that no scanner takes this file for a leak.
EXAMPLES = {
    "private key": ("-----BEGIN RSA PRIVATE", " KEY-----"),
    "AWS access key": ("AKIA", "ABCDEFGHIJKLMNOP"),
    "GitHub token": ("ghp_", "a1B2" * 9),
    "GitLab token": ("glpat-", "x1Y2z3W4v5U6t7S8r9Q0"),
    "Google API key": ("AIza", "Sy0" * 11 + "ab"),
    "Hugging Face token": ("hf_", "aB3" * 11),
    "npm token": ("npm_", "aB3d" * 9),
    "Slack token": ("xoxb-", "123456789012-abcdef"),
    "Stripe key": ("sk_live_", "a1b2c3d4e5f6a7b8"),
    "sk- API key": ("sk-proj-", "a1B2c3D4e5F6a7B8c9D0"),
    "JSON web token": ("eyJhbGciOiJIUzI1NiJ9.", "eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"),
    "Kaggle key": ('{"key": "', '0123456789abcdef0123456789abcdef"}'),
}
OURS = CredentialFilter({}, {"the teacher's key": "correct-horse-battery"})


@pytest.mark.parametrize("kind", FORMS)
def test_each_well_known_form_is_found_and_not_told(kind: str) -> None:
    secret = "".join(EXAMPLES[kind])
    found = OURS.find(f"the agent printed TOKEN={secret}\n and went on")
    assert found == kind and secret not in found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "task-force-of-the-people-who-write-long-hyphenated-words",
        "sk-learn-is-a-library-for-machine-learning",
        "commit 0123456789abcdef0123456789abcdef01234567",
        "the first 8 of AKIA",
        "export API_KEY=your-key-here",
        "hf_hub_download(repo_id)",
        "-----BEGIN PUBLIC KEY-----",
    ],
)
def test_ordinary_text_of_a_coding_agent_is_none(text: str) -> None:
    assert OURS.find(text) is None


def test_values_of_variables_with_a_secret_name_are_found_whatever_they_look_like() -> None:
    environment = {
        "MY_API_KEY": "plainwords here",
        "KEYBOARD": "qwertyuiop",
        "HF_TOKEN": "short",
        "PATH": "/usr/bin:/bin",
    }
    some = CredentialFilter(environment)
    assert some.find("it says plainwords here.") == "value of $MY_API_KEY"
    assert some.find("qwertyuiop /usr/bin:/bin short") is None


def test_the_teachers_key_is_found_by_its_own_kind() -> None:
    assert OURS.find('{"content": "Bearer correct-horse-battery"}') == "the teacher's key"
    assert CredentialFilter({}, {"the teacher's key": None}).find("None") is None
