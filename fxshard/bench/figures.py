"""Which bars the figures of each benchmark make. Times throughout: shorter is better."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fxshard.bench.chart import Chart


def of_train(results: list[dict[str, Any]]) -> list[Chart]:
    models = dict.fromkeys(result["model"] for result in results)
    return [chart for model in models for chart in _of_model(model, [r for r in results if r["model"] == model])]


def _of_model(model: str, results: list[dict[str, Any]]) -> list[Chart]:
    names = [result["name"] for result in results]
    base = "fsdp2-compile" if "fsdp2-compile" in names else names[0]
    charts = [Chart("time of a step", "ms", _bars(results, "step_ms"), base)]
    if any(result["peak_gib"] for result in results):
        charts.append(Chart("peak memory", "GiB", _bars(results, "peak_gib"), base))
    charts.append(Chart("the host, launching a step on an idle device", "ms", _bars(results, "host_ms"), base))
    charts.append(Chart("time to the first step, compiling included", "s", _bars(results, "first_step_s"), base))
    traces = {result["name"]: result["trace"] for result in results if result.get("trace")}
    if any(trace["communication_ms"] for trace in traces.values()):
        exposed = ((name, t["communication_ms"] * (1 - (t["hidden"] or 0))) for name, t in traces.items())
        charts.append(Chart("communication with no compute at the same time", "ms", tuple(exposed), base))
    if traces:
        idle = tuple((name, trace["idle_ms"]) for name, trace in traces.items())
        charts.append(Chart("nothing running on the device, within a step", "ms", idle, base))
    return [replace(chart, title=f"{model}: {chart.title}") for chart in charts]


def of_optimizer(figures: dict[str, Any]) -> list[Chart]:
    about = f"an optimizer step over {figures['matrices']} matrices"
    return [Chart(about, "ms", tuple(figures["step_ms"].items()), "torch.optim.Muon")]


def of_quantize(figures: dict[str, Any]) -> list[Chart]:
    about = f"{figures['rows']} × {figures['columns']} bf16 to both MXFP8 copies"
    return [Chart(about, "ms", tuple((t["name"], t["milliseconds"]) for t in figures["timings"]), "copy")]


def of_moe(figures: dict[str, Any]) -> list[Chart]:
    charts = []
    for result in figures["results"]:
        about = f"{result['shape']} {'with' if result['routed'] else 'without'} routing weights"
        charts.append(Chart(f"{about}, forward and backward", "ms", _experts(result, "step_ms"), "eager"))
        if figures["device"] == "cuda":
            charts.append(Chart(f"{about}, the host, launching them", "ms", _experts(result, "host_ms"), "eager"))
    return charts


def _experts(result: dict[str, Any], key: str) -> tuple[tuple[str, float], ...]:
    """What is not eager and not torch.compile is fxshard's, by the implementation of that name."""
    return tuple(
        (name if name in ("eager", "compile") else f"fxshard, {name}", found[key])
        for name, found in result["figures"].items()
    )


def of_compile_time(rows: list[dict[str, Any]]) -> list[Chart]:
    charts = []
    for model, layers in dict.fromkeys((row["model"], row["layers"]) for row in rows):
        bars = []
        for row in rows:
            if (row["model"], row["layers"]) == (model, layers):
                bars += [(row["contender"], row["first_step_s"]), (f"{row['contender']}, again", row["warm_s"])]
        names = [name for name, _ in bars]
        base = "fsdp2-compile" if "fsdp2-compile" in names else names[0]
        charts.append(
            Chart(f"{model}: time to the first step, {layers} layers; again: with a warm cache", "s", tuple(bars), base)
        )
    return charts


def of_planning(tables: list[dict[str, Any]]) -> list[Chart]:
    """What planning costs. Gains are tables of many columns: they stay tables."""
    return [
        Chart(table["title"], "s", tuple((f"fxshard, layers: {row[0]}", float(row[1])) for row in table["rows"]))
        for table in tables
        if table["head"][:2] == ["layers", "seconds"]
    ]


def of_checkpoint(found: dict[str, list[dict[str, float]]]) -> list[Chart]:
    """The first round warms up."""

    def medians(key: str) -> tuple[tuple[str, float], ...]:
        return tuple(
            (name, statistics.median(one[key] for one in rounds[1:] or rounds)) for name, rounds in found.items()
        )

    base = next(iter(found))
    return [
        Chart("saving, until training goes on", "s", medians("save_s"), base),
        Chart("saving, until it is written", "s", medians("written_after_s"), base),
        Chart("loading", "s", medians("load_s"), base),
    ]


def _bars(results: list[dict[str, Any]], key: str) -> tuple[tuple[str, float], ...]:
    return tuple((result["name"], result[key]) for result in results)


CHARTS: dict[str, Callable[[Any], list[Chart]]] = {
    "train": of_train,
    "optimizer": of_optimizer,
    "quantize": of_quantize,
    "moe": of_moe,
    "compile-time": of_compile_time,
    "planning": of_planning,
    "checkpoint": of_checkpoint,
}
