"""What `/metrics` tells, against what was done."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from headrace.server.metrics import REASONS, Distribution
from tests.server import patient
from tests.server.scripted import CONTEXT, REPLY, TURN_TOKENS, Scripted, scripted_server
from tests.server.test_chat import PATH, user
from tests.server.test_disconnect import post_and_keep
from tests.waiting import comes, until

ANSWER_TOKENS = len(REPLY) + TURN_TOKENS


@pytest.fixture
def fresh() -> Iterator[Scripted]:
    """A server of its own, all of whose figures begin at zero."""
    with scripted_server(prefix_cache=True) as server:
        yield server


def figures(server: Scripted) -> dict[str, float]:
    """Every figure by its name and its labels but for the model's, such as `x_total{kind=queue_full}`."""
    text = patient.get(f"{server.url}/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            if sample.name.startswith("headrace:"):
                assert sample.labels["model_name"] == "scripted"
            inside = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[sample.name.removeprefix("headrace:") + (f"{{{inside}}}" if inside else "")] = sample.value
    return found


def settled(server: Scripted, name: str, value: float) -> dict[str, float]:
    """The figures once one of them is as expected: a request is counted a moment after its answer."""
    assert comes(lambda: figures(server).get(name) == value), (
        f"{name} is {figures(server).get(name)}, not {value}"
    )
    return figures(server)  # those that were collected before it are of a time before it


def chat(server: Scripted, **body: object) -> httpx.Response:
    return patient.post(server.url + PATH, json=body)


def test_all_is_there_before_the_first_request(fresh: Scripted) -> None:
    found = figures(fresh)
    zero = ["num_requests_running", "num_requests_waiting", "num_preemptions_total", "kv_cache_usage_perc"]
    zero += [f"{name}_total" for name in ("prompt_tokens", "generation_tokens", "request_cancellations")]
    zero += [f"request_success_total{{finished_reason={reason}}}" for reason in REASONS]
    zero += ["time_to_first_token_seconds_count", "inter_token_latency_seconds_sum"]
    assert {name: found[name] for name in zero} == dict.fromkeys(zero, 0.0)
    assert found["engine_ready"] == 1
    assert found["process_resident_memory_bytes"] > 0
    assert found["kv_cache_blocks{group=full,state=free}"] == 16 * CONTEXT // 64


def test_tokens_steps_and_times_of_an_answer(fresh: Scripted) -> None:
    start = time.monotonic()
    usage = chat(fresh, messages=user("hi")).json()["usage"]
    settled(fresh, "request_success_total{finished_reason=stop}", 1)
    found = settled(fresh, "num_requests_running", 0)  # the engine's own sums are complete by then
    spent = time.monotonic() - start
    assert found["prompt_tokens_total"] == found["prefix_cache_queries_total"] == usage["prompt_tokens"]
    assert found["prefill_tokens_total"] == usage["prompt_tokens"] - 1
    assert found["generation_tokens_total"] == usage["completion_tokens"] == ANSWER_TOKENS
    assert found["decode_steps_total"] == ANSWER_TOKENS
    assert found["decode_rows_per_step_bucket{le=1.0}"] == found["decode_rows_per_step_sum"] == ANSWER_TOKENS
    assert found["time_to_first_token_seconds_count"] == found["request_queue_time_seconds_count"] == 1
    assert found["inter_token_latency_seconds_count"] == ANSWER_TOKENS - 1
    assert found["request_prompt_tokens_sum"] == usage["prompt_tokens"]
    assert found["request_generation_tokens_sum"] == usage["completion_tokens"]
    first, whole = found["time_to_first_token_seconds_sum"], found["e2e_request_latency_seconds_sum"]
    between = found["inter_token_latency_seconds_sum"]
    assert 0 < found["request_queue_time_seconds_sum"] < first < whole < spent
    assert whole == pytest.approx(first + between)
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(between / (ANSWER_TOKENS - 1))
    assert 0 < found["decode_seconds_total"] + found["prefill_seconds_total"] < spent


def test_a_second_turn_hits_the_prefix_cache(fresh: Scripted) -> None:
    turns = user("a long beginning " * 20)
    for _ in range(2):
        usage = chat(fresh, messages=turns).json()["usage"]
    found = figures(fresh)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert found["prefix_cache_hits_total"] == found["prompt_tokens_cached_total"] == cached > 0
    assert found["prefix_cache_queries_total"] == 2 * usage["prompt_tokens"]
    assert found["kv_cache_blocks{group=full,state=cached}"] > 0


def test_rows_queue_and_kv_while_requests_run() -> None:
    with scripted_server(max_sequences=2) as server:
        kept = [post_and_keep(server, n=2), post_and_keep(server)]
        server.wait_busy(running=2, waiting=1)
        until(lambda: server.engine.counters.steps_by_rows)
        found = figures(server)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (2, 1)
        held, free = (found[f"kv_cache_blocks{{group=full,state={each}}}"] for each in ("held", "free"))
        assert held >= 2
        assert found["kv_cache_usage_perc"] == pytest.approx(held / (held + free), abs=0.01)
        assert found["decode_rows_per_step_bucket{le=2.0}"] > 0
        for connection in kept:
            connection.close()
        server.wait_idle()
        found = settled(server, "request_cancellations_total", 3)
        assert found["request_success_total{finished_reason=abort}"] == 3
        assert found["num_requests_running"] == found["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_counted_and_was_stopped_within_a_step(fresh: Scripted, stream: bool) -> None:
    connection = post_and_keep(fresh, stream=stream)
    fresh.wait_busy(running=1)
    connection.close()
    settled(fresh, "request_cancellations_total", 1)
    found = settled(fresh, "engine_cancellations_total", 1)
    assert found["late_cancellations_total"] == 0
    assert found["request_success_total{finished_reason=abort}"] == 1
    assert not any(name.startswith("request_errors_total{") for name in found)


def test_an_answer_that_the_server_ends_is_no_cancellation(fresh: Scripted) -> None:
    chat(fresh, messages=user("say {one two three}"), stop=["two"])
    found = settled(fresh, "request_success_total{finished_reason=stop}", 1)
    assert found["request_cancellations_total"] == 0


def test_errors_by_kind(fresh: Scripted) -> None:
    chat(fresh, messages=user("x" * 5000))
    chat(fresh, messages="x")
    chat(fresh)
    for number in range(3):
        patient.get(f"{fresh.url}/nowhere/{number}")
    found = settled(fresh, "request_errors_total{kind=unknown_path}", 3)
    assert found["request_errors_total{kind=context_length_exceeded}"] == 1
    assert found["request_errors_total{kind=bad_request}"] == 2
    assert sum(name.startswith("request_errors_total{") for name in found) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine(stream: bool) -> None:
    with scripted_server() as server:
        chat(server, messages=user("crash"), stream=stream)
        found = settled(server, "request_errors_total{kind=engine_error}", 1)
        assert found["request_success_total{finished_reason=error}"] == 1
        found = settled(server, "engine_ready", 0)
        assert found["num_requests_running"] == found["kv_cache_usage_perc"] == 0
        assert not [name for name in found if name.startswith("kv_cache_blocks")]


def test_labels_do_not_grow_with_requests(fresh: Scripted) -> None:
    names = []
    for number in range(1, 5):
        chat(fresh, messages=user(f"hi {number}"), user=f"user-{number}", max_tokens=number)
        patient.get(f"{fresh.url}/v1/models/{number}", headers={"X-Request-Id": str(number)})
        names.append(set(settled(fresh, "request_errors_total{kind=model_not_found}", number)))
    assert names[0] == names[-1]


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0; charset=utf-8"])
def test_names_are_the_same_whatever_form_is_asked_for(http: httpx.Client, accept: str) -> None:
    response = http.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nheadrace:num_requests_running{" in response.text


def test_a_key_guards_the_figures() -> None:
    with scripted_server(served={"api_keys": ("key",)}) as server:
        assert patient.get(f"{server.url}/metrics").status_code == 401
        headers = {"Authorization": "Bearer key"}
        assert patient.get(f"{server.url}/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize("bounds", [(1, 2, 5), (0.25, 1.5)])
def test_distributions_are_the_librarys_histograms(bounds: tuple[float, ...]) -> None:
    values = [0, 0.25, 0.3, 1, 1.5, 2, 2.0001, 5, 6, 100]
    ours = Distribution("x", "explained", bounds)
    registry = CollectorRegistry()
    theirs = Histogram("headrace:x", "explained", ["model"], buckets=bounds, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.labels("m").observe(value)
    [family] = registry.collect()
    expected = [sample for sample in family.samples if not sample.name.endswith("_created")]
    assert sorted(ours.family({"model": "m"}).samples, key=str) == sorted(expected, key=str)


def test_two_applications_in_a_process_do_not_meet() -> None:
    with scripted_server() as one, scripted_server() as other:
        chat(one, messages=user("hi"))
        settled(one, "request_success_total{finished_reason=stop}", 1)
        assert figures(other)["request_success_total{finished_reason=stop}"] == 0
