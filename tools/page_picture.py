"""Draw the page of the server for the documentation: a scripted talk, in a headless Chromium.

python -m tools.page_picture docs/images/page.png
"""

from __future__ import annotations

import argparse

from tests.server.scripted import scripted_server
from tests.server.test_page import Visit, answers, headless

LINES = (
    "The loop ends before n, so one mill is left out.<|END_THINKING|><|START_TEXT|>The last mill is never "
    "counted. End the range one later:\n```python\nfor mill in range(1, n + 1):\n    total += flow[mill]\n"
    "```\nThe sum is then right for n = 1 too.<|END_TEXT|>",
    "It leads the water to the wheel.<|END_THINKING|><|START_TEXT|>The channel that brings the water to the "
    "mill wheel.<|END_TEXT|>",
)
QUESTIONS = ("Why is total too small by one mill?", "And what is a headrace?")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the page of the server for the documentation.")
    parser.add_argument("image", help="the PNG to write")
    path = parser.parse_args().image
    with (
        scripted_server(prefix_cache=True) as server,
        headless() as browser,
    ):
        context = browser.new_context(viewport={"width": 1200, "height": 840})
        visit = Visit(context, server.url)
        server.says(*LINES)
        for number, question in enumerate(QUESTIONS, 1):
            visit.say(question)
            answers(visit, number)
            visit.page.wait_for_timeout(4000)  # two looks at the figures
        visit.page.locator("summary").first.click()
        visit.page.screenshot(path=path)
        context.close()


if __name__ == "__main__":
    main()
