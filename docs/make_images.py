"""Make the pictures in docs/images: plan a 70B Llama for 1024 ranks, render the page, photograph it with Chromium.

python docs/make_images.py                  # plans all 80 layers, which takes minutes
python docs/make_images.py schedule.html    # a page that is there already
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
PLAN = ("inspect", "llama-70b", "--world-size", "1024", "--zero", "3", "--hardware", "h200", "--budget", "130GiB")
WIDTH, HEIGHT = 1500, 900
ZOOM = (0.76, 0.98)
"""Seconds of the step that the zoomed picture shows: the end of forward and the first layers of backward."""

HOVER = """<script>
{ const box = document.querySelector("#timeline").getBoundingClientRect();
const x = box.width * %s, y = %s;
point(x, y, box.left + x, box.top + y); }
</script></body>"""
"""Puts the pointer on an event of the timeline."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures in docs/images.")
    parser.add_argument("page", nargs="?", type=Path, help="a rendered schedule; planned and rendered if not given")
    page = parser.parse_args().page
    browser = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit("this needs chromium or google-chrome")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if page is None:
            page = Path(folder) / "schedule.html"
            subprocess.run([sys.executable, "-m", "fxshard.cli.main", *PLAN, "--html", str(page)], check=True)
        hovered = Path(folder) / "hovered.html"
        hovered.write_text(page.read_text().replace("</body>", HOVER % (0.37, 110)))
        photograph(browser, page, IMAGES / "schedule-light.png")
        photograph(browser, page, IMAGES / "schedule-dark.png", dark=True)
        photograph(browser, hovered, IMAGES / "schedule-zoomed.png", "#from={}&to={}".format(*ZOOM))


def photograph(browser: str, page: Path, image: Path, link: str = "", dark: bool = False) -> None:
    options = [f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=3000", f"--screenshot={image}"]
    if dark:
        options.append("--blink-settings=preferredColorScheme=0")
    else:
        options.append("--blink-settings=preferredColorScheme=1")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
    subprocess.run([*command, page.resolve().as_uri() + link], check=True, capture_output=True, timeout=120)
    print(f"wrote {image}")


if __name__ == "__main__":
    main()
