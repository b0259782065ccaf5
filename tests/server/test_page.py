"""The page at `/`, in a headless Chromium."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, ViewportSize, expect, sync_playwright

from headrace.server.page import endpoint
from tests.server import patient
from tests.server.scripted import REPLY, Scripted, scripted_server
from tests.waiting import WAIT, until

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# As root there is no sandbox; the rest keeps it from looking for its makers' hosts.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
SIZE: ViewportSize = {"width": 1200, "height": 760}


@contextmanager
def headless() -> Iterator[Browser]:
    """A browser. Raises LookupError if none is installed."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        known = ", ".join(BROWSERS)
        raise LookupError(f"no browser: none of {known} is installed (Debian: apt-get install chromium)")
    expect.set_options(timeout=1000 * WAIT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=1000 * WAIT)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with ExitStack() as stack:
        try:
            browser = stack.enter_context(headless())
        except LookupError as error:
            pytest.skip(str(error))
        yield browser


class Visit:
    """A page that is open, and what it asked for and complained about."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(1000 * WAIT)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)

    def say(self, text: str) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_role("button", name="Send").click()

    def figure(self, name: str) -> str:
        return self.page.locator(f"#{name}").inner_text()


@pytest.fixture
def served() -> Iterator[Scripted]:
    with scripted_server(prefix_cache=True) as server:
        yield server


@pytest.fixture(params=["light", "dark"])
def colours(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport=SIZE)
    yield context
    context.close()


@pytest.fixture
def visit(context: BrowserContext, served: Scripted) -> Iterator[Visit]:
    """The page, open; at the end it must have asked nobody else, and found nothing to complain about."""
    visit = Visit(context, served.url)
    yield visit
    assert {httpx.URL(url).netloc.decode() for url in visit.asked} == {httpx.URL(served.url).netloc.decode()}
    assert visit.complaints == []


def answers(visit: Visit, count: int) -> None:
    """Wait until that many answers are complete."""
    expect(visit.page.locator("article.assistant .facts:visible")).to_have_count(count)


def test_a_chat_of_two_turns(visit: Visit, served: Scripted) -> None:
    expect(visit.page.locator("#model")).to_have_text("scripted")
    visit.say("hi " * 40)
    answers(visit, 1)
    visit.say("say {```py\nprint('<b>')\n``` and that is all}")
    answers(visit, 2)
    first, second = visit.page.locator("article.assistant").all()
    expect(first.locator(":scope > .text")).to_have_text(REPLY)
    expect(second.locator("pre code")).to_have_text("print('<b>')\n")
    expect(second.locator(":scope > .text")).to_contain_text("and that is all")
    assert REPLY in served.prompt, "the second turn tells the model of the first"
    facts = second.locator(".facts").inner_text()
    told = re.search(r"(\d+) tokens · (\d+) of (\d+) from cache · first after .+s · [\d.]+ tokens/s", facts)
    assert told is not None, facts
    assert 0 < int(told[2]) < int(told[3]) == len(served.engine.submitted[-1].prompt)


def test_reasoning_is_shown_folded(visit: Visit, served: Scripted) -> None:
    served.says("I wonder.<|END_THINKING|><|START_TEXT|>I know.<|END_TEXT|>")
    visit.say("hi")
    answers(visit, 1)
    article = visit.page.locator("article.assistant")
    expect(article.locator(":scope > .text")).to_have_text("I know.")
    thoughts = article.locator("details .text")
    expect(thoughts).to_be_hidden()
    article.get_by_text("Thoughts").click()
    expect(thoughts).to_have_text("I wonder.")
    visit.say("and now?")
    answers(visit, 2)
    assert "I wonder." in served.prompt, "thoughts go back to the model"


def test_stop_ends_the_answer_in_the_engine_too(visit: Visit, served: Scripted) -> None:
    served.begins("<|END_THINKING|><|START_TEXT|>" + "word " * 100)
    visit.say("go")
    expect(visit.page.locator("article.assistant > .text")).to_contain_text("word word")
    visit.page.get_by_role("button", name="Stop").click()
    answers(visit, 1)
    expect(visit.page.locator(".facts")).to_contain_text("stopped")
    expect(visit.page.locator("#left")).to_have_text("1")
    until(lambda: served.engine.counters.cancelled == 1)
    expect(visit.page.get_by_role("button", name="Send")).to_be_enabled()
    visit.say("hi")  # what was said so far is kept, and the talk goes on
    answers(visit, 2)
    assert "word word" in served.prompt


def test_new_chat_forgets(visit: Visit, served: Scripted) -> None:
    visit.say("remember the mill")
    answers(visit, 1)
    visit.page.get_by_role("button", name="New chat").click()
    expect(visit.page.locator("article")).to_have_count(0)
    visit.say("hi")
    answers(visit, 1)
    assert "mill" not in served.prompt


def test_the_figures_live(visit: Visit) -> None:
    expect(visit.page.get_by_role("status")).to_have_text("ready")
    expect(visit.page.locator("#answers")).to_have_text("0")
    visit.say("hi")
    expect(visit.page.locator("#answers")).to_have_text("1")
    assert re.fullmatch(r"[\d.]+ m?s", visit.figure("first"))
    assert re.fullmatch(r"[\d.]+ m?s", visit.figure("between"))
    assert visit.figure("rows") == "1.0"
    assert visit.figure("kv") == "0 %"
    assert visit.page.locator("#curve").get_attribute("points")
    visit.say("endless")
    expect(visit.page.locator("#running")).to_have_text("1")
    expect(visit.page.locator("#rate")).not_to_have_text("0.0")
    visit.page.get_by_role("button", name="Stop").click()


def test_a_server_that_began_anew_counts_anew(context: BrowserContext, served: Scripted) -> None:
    made = itertools.chain((500, 100), itertools.repeat(120))

    def figures(route: Route) -> None:
        route.fulfill(body=f'headrace:generation_tokens_total{{model_name="m"}} {next(made)}\n')

    context.route("**/metrics", figures)
    visit = Visit(context, served.url)
    expect(visit.page.locator("#rate")).to_have_text("0.0")  # from 120 to 120, the fourth look
    heights = re.findall(r",([\d.]+)", visit.page.locator("#curve").get_attribute("points") or "")
    assert heights
    assert max(map(float, heights)) <= 46, "no rate is below the line, which is none"


def test_an_error_is_told_and_the_question_can_be_changed(context: BrowserContext, served: Scripted) -> None:
    visit = Visit(context, served.url)  # the browser notes the 400 on its console
    visit.say("x" * 5000)
    expect(visit.page.get_by_role("alert")).to_contain_text("maximum context length")
    visit.say("hi")
    answers(visit, 1)
    expect(visit.page.locator("#error")).to_be_hidden()
    assert "xxx" not in served.prompt


def test_a_dead_engine_is_seen(context: BrowserContext, served: Scripted) -> None:
    visit = Visit(context, served.url)
    visit.say("crash")
    expect(visit.page.locator("#error")).to_contain_text("the script says so")
    expect(visit.page.get_by_role("status")).to_have_text("not ready")


def test_a_key_is_asked_for_until_it_is_right(context: BrowserContext) -> None:
    with scripted_server(served={"api_keys": ("sesame",)}) as server:
        visit = Visit(context, server.url)
        dialog = visit.page.get_by_role("dialog", name="This server asks for a key")
        expect(dialog).to_be_visible()
        visit.page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        for key in ("wrong", "sesame"):
            dialog.get_by_label("API key").fill(key)
            dialog.get_by_role("button", name="Use it").click()
            if key == "wrong":
                expect(dialog.get_by_role("alert")).to_have_text("The server did not take that key.")
        expect(dialog).to_be_hidden()
        expect(visit.page.locator("#model")).to_have_text("scripted")
        visit.say("hi")
        answers(visit, 1)
        expect(visit.page.get_by_role("status")).to_have_text("ready")
        expect(visit.page.locator("#all")).to_be_hidden()


def test_it_works_from_the_keyboard_alone(visit: Visit) -> None:
    expect(visit.page.get_by_label("Message")).to_be_focused()
    visit.page.keyboard.type("one")
    visit.page.keyboard.press("Shift+Enter")
    visit.page.keyboard.type("two")
    visit.page.keyboard.press("Enter")
    answers(visit, 1)
    assert visit.page.locator("article.user .text").inner_text() == "one\ntwo"
    expect(visit.page.get_by_label("Message")).to_be_focused()


def violations(page: Page) -> list[str]:
    """What axe finds against the accessibility rules."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]


@pytest.mark.parametrize("width", [1200, 400])
def test_accessible_in_both_colours(visit: Visit, colours: str, width: int, served: Scripted) -> None:
    visit.page.emulate_media(color_scheme="dark" if colours == "dark" else "light")
    visit.page.set_viewport_size({"width": width, "height": 760})
    served.says("I wonder.<|END_THINKING|><|START_TEXT|>I know `it`.\n```\ncode\n```\n<|END_TEXT|>")
    visit.say("hi")
    answers(visit, 1)
    visit.page.get_by_text("Thoughts").click()
    expect(visit.page.get_by_role("status")).to_have_text("ready")
    assert violations(visit.page) == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) < 100) == (colours == "dark")


def test_the_check_of_accessibility_sees_a_defect(visit: Visit) -> None:
    visit.page.evaluate("document.querySelector('label[for=prompt]').remove()")
    visit.page.evaluate("document.getElementById('prompt').removeAttribute('placeholder')")
    assert any(each.startswith("label:") for each in violations(visit.page))


def test_the_page_may_only_load_what_is_its_own(context: BrowserContext, served: Scripted) -> None:
    visit = Visit(context, served.url)
    script = "fetch('http://127.0.0.1:9/').then(() => 'loaded', (error) => error.name)"
    with visit.page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        assert visit.page.evaluate(script) == "TypeError"


def test_without_a_browser_the_tests_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LookupError, match="apt-get install chromium"), headless():
        pass


def test_the_files_are_part_of_the_package() -> None:
    with scripted_server() as server:
        for path, (_, kind) in endpoint._FILES.items():
            response = patient.get(server.url + path)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in response.headers["content-security-policy"]
        assert patient.head(f"{server.url}/").status_code == 200
