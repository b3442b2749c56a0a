"""Whatever JSON arrives, a dialect reads it or refuses it as the request's fault."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.capture.canonical import Memo
from pipeline.capture.dialects import DIALECTS
from pipeline.capture.dialects.base import ApiError, Dialect

NAMES = (
    "role type content text id name input tools tool_calls function arguments messages system contents parts output "
    "functionCall functionResponse response args call_id summary tool_use_id is_error model instructions tool_choice "
    "source data url image_url thinking inlineData mimeType description parameters input_schema format action"
).split()
WORDS = (
    "user assistant tool system developer model text tool_use tool_result function function_call message reasoning "
    "function_call_output input_text output_text custom namespace custom_tool_call thinking image required any"
).split()
SCALARS = st.sampled_from([*WORDS, "", "{}", "{bad", None, True, 1, 0.5])
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
)
ITEM = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4).flatmap(
    lambda rest: st.fixed_dictionaries({"role": SCALARS, "type": SCALARS}).map(lambda head: rest | head)
)
HISTORY = st.lists(ITEM, min_size=1, max_size=3)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=HISTORY, data=st.data())
def test_any_json_is_read_or_refused(dialect: Dialect, history: list[Any], data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(dialect.fields)), JSON, max_size=4))
    body = {"model": "m", "messages": history, "input": history, "contents": history, **fields}
    with contextlib.suppress(ApiError):
        request = dialect.parse(msgspec.json.encode(body), Memo(), "/v1beta/models/m:generateContent")
        assert all(message["role"] for message in request.messages())
        assert isinstance(request.constraint, str)
