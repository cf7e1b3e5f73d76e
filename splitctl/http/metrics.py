"""Numbers for Prometheus: our own under ``splitctl_``, and llama-server's names where they mean the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from splitctl.control.server import SessionService
from splitctl.host.config import HostState
from splitctl.host.streams import Why
from splitctl.outcome import WeightsTier
from splitctl.placement import SplitMode

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""What the text is."""

_MS = 1e-3


class Metrics:
    """Counts what the server answered, and reads the rest of the session when asked.

    Thread: the loop's.
    """

    def __init__(self, host: SessionService) -> None:
        # When a counter began says nothing here: all begin with the server.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._host = host
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "splitctl_http_requests", "Answers by route and status.", ("route", "status"), registry=self._registry
        )
        self._answers = Counter(
            "splitctl_answers", "Generations over HTTP by what ended them.", ("why",), registry=self._registry
        )
        self._registry.register(_Session(host))

    @property
    def started_at(self) -> str:
        """When the session began, whole seconds since 1970: what was counted is from then on."""
        return str(int(self._host.status().get("started_at") or 0))

    def request(self, route: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()

    def done(self, why: Why) -> None:
        """Count a generation."""
        self._answers.labels(why.value).inc()

    def text(self) -> bytes:
        """Give all of it in Prometheus's text format."""
        return generate_latest(self._registry)


class _Session(Collector):
    """Reads the session's own numbers."""

    def __init__(self, host: SessionService) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """Give them as they are now."""
        status = self._host.status()
        sequences: list[dict[str, Any]] = list(status["sequences"])
        n_busy = sum(one["state"] != "idle" for one in sequences)
        rates, totals = status.get("tokens_per_second") or {}, status.get("totals") or {}
        for name, text, value in (
            ("llamacpp:prompt_tokens_seconds", "Average prompt throughput in tokens/s.", rates.get("prompt")),
            ("llamacpp:predicted_tokens_seconds", "Average generation throughput in tokens/s.", rates.get("generate")),
            ("llamacpp:requests_processing", "Number of requests processing.", n_busy),
            ("llamacpp:requests_deferred", "Number of requests deferred.", status.get("queued")),
            ("llamacpp:n_tokens_max", "Largest observed sequence length.", totals.get("n_tokens_max")),
            ("splitctl_sequences", "Sequences that there are.", len(sequences)),
            ("splitctl_tokens_held", "Tokens that all sequences hold.", sum(one["n_tokens"] for one in sequences)),
        ):
            yield GaugeMetricFamily(name, text, value=float(value or 0))
        state = GaugeMetricFamily("splitctl_state", "1 for the state that the session is in.", labels=["state"])
        for known in HostState:
            state.add_metric([known.value], float(known.value == status["state"]))
        yield state
        mode = GaugeMetricFamily("splitctl_split_mode", "1 for the split mode that serves.", labels=["mode"])
        for offered in SplitMode:
            mode.add_metric([offered.value], float(offered.value == status.get("effective")))
        yield mode
        tier = GaugeMetricFamily(
            "splitctl_weights_tier", "1 for where switches take the weights from.", labels=["tier"]
        )
        for wanted in WeightsTier:
            tier.add_metric([wanted.value], float(wanted.value == (status.get("weights") or {}).get("tier")))
        yield tier
        pause = (status.get("last_switch") or {}).get("pause_ms")
        if pause is not None:
            text = "How long the last switch let nothing be generated."
            yield GaugeMetricFamily("splitctl_switch_pause_seconds", text, value=pause * _MS)
        for name, text, value in (
            ("llamacpp:prompt_tokens", "Prompt tokens processed, without cached ones.", totals.get("n_read")),
            ("llamacpp:prompt_tokens_cached", "Prompt tokens that a sequence held already.", totals.get("n_reused")),
            ("llamacpp:prompt_seconds", "Prompt process time.", totals.get("prompt_ms", 0.0) * _MS),
            ("llamacpp:tokens_predicted", "Generation tokens processed.", totals.get("n_drawn")),
            ("llamacpp:tokens_predicted_seconds", "Predict process time.", totals.get("generate_ms", 0.0) * _MS),
            ("splitctl_worker_restarts", "Workers that were lost and replaced.", status.get("worker_restarts")),
            ("splitctl_recomputed", "Times that tokens had to be read again.", status.get("recomputed")),
        ):
            yield CounterMetricFamily(name, text, value=float(value or 0))
        switches = CounterMetricFamily("splitctl_switches", "Switches by how they ended.", labels=["status"])
        for ended, n in (status.get("switches") or {}).get("ended", {}).items():
            switches.add_metric([ended], float(n))
        yield switches
        yield from _policy(status.get("policy") or {})


def _policy(policy: Mapping[str, Any]) -> Iterator[Metric]:
    """Give what the policy has decided, where there is one."""
    if policy.get("policy") != "auto":
        return
    decisions = CounterMetricFamily(
        "splitctl_policy_decisions", "What the policy decided: to stay, to hold prompts, to switch.", labels=["action"]
    )
    for action, n in policy["decisions"].items():
        decisions.add_metric([action], float(n))
    yield decisions
    yield GaugeMetricFamily("splitctl_policy_held", "Prompts that wait for a switch.", value=float(policy["held"]))
    waits, text = policy["waits"], "How long prompts were held for a switch."
    yield SummaryMetricFamily("splitctl_policy_wait_seconds", text, waits["count"], waits["sum_s"])
