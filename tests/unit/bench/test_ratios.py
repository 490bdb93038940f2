"""What is wanted of the gateway's figures is held against them, and against nothing else."""

from typing import Any

from tests.bench.ratios import ratios

OURS = {
    "cpu_ms_per_request": 5.0,
    "render_ms_per_request": 1.0,
    "render_ms_per_continued_request": 0.1,
    "cpu_us_per_chunk": 30.0,
    "ttft_ms_p50": 4.0,
    "failed": 0,
}
THEIRS = {"cpu_ms_per_request": 2.0, "cpu_us_per_chunk": 20.0, "ttft_ms_p50": 2.0}


def both(**changed: float) -> dict[str, Any]:
    return {"clawstream": {"1": OURS | changed}, "tensorzero": {"1": THEIRS}, "direct": {"1": THEIRS}}


def test_what_is_as_wanted_is_met_and_what_is_not_is_not() -> None:
    found = ratios(both())
    assert {name: ratio["met"] for name, ratio in found.items() if ratio["by_concurrency"]} == {
        "cpu_per_request_without_rendering_to_tensorzero": True,
        "cpu_per_chunk_to_tensorzero": True,
        "rendering_of_a_continued_request_to_a_first_ones": True,
        "added_ttft_ms_beyond_rendering": True,
    }
    assert found["cpu_per_request_without_rendering_to_tensorzero"]["by_concurrency"] == {"1": 2.0}
    assert found["added_ttft_ms_beyond_rendering"]["by_concurrency"] == {"1": 1.0}
    assert not ratios(both(cpu_ms_per_request=5.1))["cpu_per_request_without_rendering_to_tensorzero"]["met"]


def test_an_arm_or_a_concurrency_that_was_not_measured_meets_nothing() -> None:
    found = ratios(both())
    assert "cpu_per_request_to_litellm" not in found
    assert found["failed_of_200_streams"]["met"] is None
