"""Views of a report in a browser, as its tests look at them."""

import pytest


def texts(tab, selector):
    """Text of each element, in one line."""
    return [" ".join(text.split()) for text in tab.locator(selector).all_text_contents()]


def faults(visit, file, views, width, theme):
    """By view: what axe finds, and how much wider than the screen it is."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    found = {}
    for name, place in views.items():
        with visit(file, place, width=width, theme=theme, bypass_csp=True) as tab:
            if name == "report":
                tab.evaluate("dispatchEvent(new Event('beforeprint'))")
                tab.wait_for_selector("[data-figure]:not([data-drawn])", state="detached")
            said = axe.Axe().run(tab).response["violations"]

            wider = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
        found[name] = [(one["id"], one["nodes"][0]["html"][:200]) for one in said]
        found[name] += [f"{wider} px wider than the screen"] if wider > 0 else []
    return found
