"""The page, also in a real browser: one self-contained file that draws itself."""

import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fxshard.planner.hardware import hardware
from fxshard.schedule.html import duration, embedded, to_html
from fxshard.schedule.schedule import Schedule
from tests.inspect.schedules import drawn

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian package: chromium)")


def page(schedule: Schedule) -> str:
    return to_html(schedule, schedule.simulate("h200"))


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def chromium(path: Path, *options: str, fragment: str = "") -> str:
    """What the browser prints about a page, after its scripts ran."""
    assert CHROMIUM is not None
    profile = f"--user-data-dir={path.parent / 'profile'}"
    sandbox = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", profile)
    command = [CHROMIUM, *sandbox, "--window-size=1500,1000", *options, f"{path.as_uri()}{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_nothing_is_loaded_from_the_network() -> None:
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttpRequest""", page(drawn()))


def test_names_cannot_break_out_of_the_page() -> None:
    nasty = "</script><script>alert(1)</script>&amp;<!--"
    text = page(drawn(unit=nasty))
    assert "alert(1)</script>" not in text
    assert text.count("</script>") == 2
    assert any(bucket["name"].startswith(nasty) for bucket in data_of(text)["buckets"])


def test_embedded_json_is_still_json() -> None:
    value = {"a": "</script> & \u2028 <b>", "n": [1, None, 2.5]}
    assert json.loads(embedded(value)) == value
    assert not set("<>&\u2028") & set(embedded(value))


def test_data_is_the_schedule() -> None:
    schedule = drawn(layers=5, budget=2**30)
    data = data_of(page(schedule))
    assert len(data["events"]) == len(data["spans"]) == len(schedule)
    assert [bucket["name"] for bucket in data["buckets"]] == [bucket.name for bucket in schedule.buckets]
    assert data["budget"] == 2**30
    assert [data["buckets"][i]["name"] for i in data["order"]][:2] == ["embed", "layers.0"]
    assert "exposed communication" in {name for name, _, _ in data["figures"]}


def test_the_page_names_model_batch_and_machine_with_its_memory() -> None:
    schedule = drawn(layers=5)
    machine = hardware("h200")
    text = to_html(schedule, schedule.simulate("h200"), machine, "llama-70b · 5 layers (--layers) · inputs of 1 × 4096")
    data = data_of(text)
    assert (
        data["about"] == "llama-70b · 5 layers (--layers) · inputs of 1 × 4096 · simulated on h200, 131.32 GiB a device"
    )
    assert data["capacity"] == machine.memory_bytes
    assert "<title>llama-70b · 5 layers" in text
    assert "simulated on h100" in data_of(schedule.to_html(hardware="h100", about="mine"))["about"]
    nothing = data_of(page(schedule))
    assert nothing["about"] == "" and nothing["capacity"] is None


def test_activations_are_told_from_shards_and_arena() -> None:
    schedule = drawn(layers=5)
    memory = data_of(page(schedule))["memory"]
    assert max(held for _, held, _ in memory) > max(planned for _, _, planned in memory)
    assert max(planned for _, _, planned in memory) <= schedule.resident_bytes + schedule.arena_bytes
    assert min(planned for _, _, planned in memory) == schedule.resident_bytes


def test_thousands_of_events_make_a_small_page() -> None:
    assert len(page(drawn(layers=320, ranks=1024))) < 2**20


@in_browser
@pytest.mark.shows("P7")
def test_the_page_draws_itself(tmp_path: Path) -> None:
    schedule = drawn(layers=80, ranks=1024, dim=8192, budget=8 * 2**30)
    path = tmp_path / "schedule.html"
    path.write_text(page(schedule), encoding="utf-8")
    dom = chromium(path, "--dump-dom")
    body = re.search(r"<body[^>]*>", dom)
    assert body is not None and 'data-ready="yes"' in body[0], "a script of the page failed"
    assert f'data-drawn="{len(schedule)}"' in body[0]
    assert dom.count('<tr class="bucket"') == len(schedule.buckets)
    assert "ZeRO-3 on 1024 ranks" in dom and 'class="figure"' in dom


@in_browser
@pytest.mark.shows("P7")
def test_search_finds_a_parameter_and_shows_the_bucket(tmp_path: Path) -> None:
    path = tmp_path / "schedule.html"
    path.write_text(page(drawn(layers=12, unit="</script>layers")), encoding="utf-8")
    dom = chromium(path, "--dump-dom", fragment="#q=layers.7.mlp.down")
    assert "1 of 14" in dom
    assert dom.count('<tr class="bucket on"') == 1 and "layers.7.mlp.down.weight [256, 256]" in dom
    assert dom.count('<tr class="bucket" hidden') == 13


@in_browser
@pytest.mark.shows("P7")
@pytest.mark.parametrize(("scheme", "bright"), [(1, True), (0, False)], ids=["light", "dark"])
def test_a_picture_in_light_and_dark(tmp_path: Path, scheme: int, bright: bool) -> None:
    path, picture = tmp_path / "schedule.html", tmp_path / "page.png"
    path.write_text(page(drawn(layers=4)), encoding="utf-8")
    chromium(path, f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1500, 1000)
    assert len(data) > 30_000, "an almost empty page"
    assert (first_pixel(data) > 128) is bright


def first_pixel(png: bytes) -> int:
    """Red of the upper left pixel: the first pixel of a PNG has no neighbours to be predicted from."""
    import zlib

    chunks, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            chunks += png[at + 8 : at + 8 + length]
        at += 12 + length
    return zlib.decompressobj().decompress(chunks, 64)[1]


def test_durations() -> None:
    assert (duration(2.5), duration(0.0123), duration(4e-6), duration(0)) == ("2.50 s", "12.30 ms", "4.0 µs", "0.0 µs")
