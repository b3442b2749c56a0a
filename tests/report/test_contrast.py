"""The page's colours can be read, light and dark: contrast ratios of WCAG 2.2 from the style sheet's variables."""

from __future__ import annotations

import re

import pytest

from pipeline.report.markup import ASSETS
from pipeline.report.svg import COLORS

TEXT, GRAPHIC = 4.5, 3.0  # success criteria 1.4.3 and 1.4.11
STYLE = (ASSETS / "page.css").read_text()
PROBABILITIES = [f"p{place}" for place in range(6)]

Rgb = tuple[float, float, float]


def variables(scheme: str) -> dict[str, Rgb]:
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    found = dict(re.findall(r"--(\w+): #(\w{6})", light))
    if scheme == "dark":
        found |= dict(re.findall(r"--(\w+): #(\w{6})", dark))
    return {name: _rgb(value) for name, value in found.items()}


def _rgb(value: str) -> Rgb:
    red, green, blue = (int(value[place : place + 2], 16) / 255 for place in (0, 2, 4))
    return red, green, blue


def luminance(color: Rgb) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Rgb, other: Rgb) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast(_rgb("000000"), _rgb("ffffff")) == pytest.approx(21.0)
    assert contrast(_rgb("777777"), _rgb("ffffff")) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str) -> None:
    colors = variables(scheme)
    pairs = [(text, ground) for text in ("ink", "soft") for ground in ("paper", "panel")]
    pairs += [("accent", "paper"), *(("ink", ground) for ground in PROBABILITIES)]
    low = {pair: contrast(colors[pair[0]], colors[pair[1]]) for pair in pairs}
    assert {pair: round(ratio, 2) for pair, ratio in low.items() if ratio < TEXT} == {}


def test_tokens_that_are_not_trained_are_not_paler() -> None:
    """With 65% opacity, as they once had, ink on the colours of unlikely tokens falls to 2.6."""
    (rule,) = re.findall(r"\.untrained \{(.*?)\}", STYLE)
    assert "opacity" not in rule and "color" not in rule


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_of_charts_borders_and_the_focus_can_be_seen(scheme: str) -> None:
    colors = variables(scheme)
    graphics = ["accent", "soft", *(f"c{place}" for place in range(COLORS))]
    low = {name: contrast(colors[name], colors["paper"]) for name in graphics}
    assert {name: round(ratio, 2) for name, ratio in low.items() if ratio < GRAPHIC} == {}
    assert ":focus-visible { outline: 3px solid var(--accent)" in STYLE
