import math

import pytest

from w4a4.serve.request import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**63),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop", ("a",) * 65),
        ("stop", ("a" * 1025,)),
        ("stop_token_ids", frozenset(range(257))),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_min_tokens_is_at_most_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens is 5, expected <= max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
