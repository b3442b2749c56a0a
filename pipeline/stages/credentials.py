"""Whether a text holds a credential: well-known key forms, and the values of this process's own secret variables.

A find is named by its kind, never by its text. A rollout with one is not recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SHORTEST = 8  # characters of a variable's value that is looked for: shorter ones stand in ordinary text too
SECRET_WORDS = frozenset(
    ("key", "apikey", "token", "secret", "password", "passwd", "passphrase", "credential", "credentials")
)

# Forms that their makers publish, so that scanners find them.
FORMS: dict[str, str] = {
    "private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
    "AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{22,}",
    "GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "Google API key": r"\bAIza[0-9A-Za-z_-]{35}",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "npm token": r"\bnpm_[A-Za-z0-9]{36}",
    "Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "Stripe key": r"\b[rs]k_live_[A-Za-z0-9]{16,}",
    "sk- API key": r"\bsk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic, and a rollout's own
    "JSON web token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "Kaggle key": r"\"key\"\s*:\s*\"[0-9a-f]{32}\"",
}
_FORMS = {kind: re.compile(form) for kind, form in FORMS.items()}


class CredentialFilter:
    """Looks for the key forms, and for the values of the secret variables of ``environment``.

    ``secrets``: more values that must not be in a text, by their kinds.
    """

    def __init__(self, environment: Mapping[str, str], secrets: Mapping[str, str | None] | None = None) -> None:
        own = {f"value of ${name}": value for name, value in environment.items() if _is_secret(name)}
        values = own | {kind: value for kind, value in (secrets or {}).items() if value}
        self._values = {kind: value for kind, value in values.items() if len(value.strip()) >= SHORTEST}

    def find(self, text: str) -> str | None:
        """The kind of a credential in ``text``, or None."""
        kind = next((kind for kind, value in self._values.items() if value in text), None)
        return kind or next((kind for kind, form in _FORMS.items() if form.search(text)), None)


def _is_secret(variable: str) -> bool:
    return not SECRET_WORDS.isdisjoint(variable.lower().split("_"))
