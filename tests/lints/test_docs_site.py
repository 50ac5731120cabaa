"""The site: formulas of the pages, links out of the docs, and tables that it fills."""

import importlib.util
import re
import tomllib
from types import SimpleNamespace

import markdown
import pathspec
import pytest
import yaml
from mkdocs.exceptions import PluginError

from perturn.config.peer_settings import peers
from support.docs import PAGES, ROOT


def load_hooks():
    """The hooks of the site, as mkdocs loads them: from their file."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typeset(text):
    """The HTML of Markdown, as the site makes it."""
    named = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["markdown_extensions"]
    settings = {name: each for entry in named if isinstance(entry, dict) for name, each in entry.items()}
    plain = [entry for entry in named if isinstance(entry, str)]
    made = markdown.markdown(text, extensions=[*plain, *settings], extension_configs=settings)
    return load_hooks().typeset(made, "page.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_formula_of_a_page_converts(page):
    """To MathML; no dollar is left over outside of code."""
    made = typeset((ROOT / page).read_text())

    assert "arithmatex" not in made
    assert "$" not in re.sub(r"<code>.*?</code>|<pre>.*?</pre>", "", made, flags=re.DOTALL)


def test_a_formula_becomes_mathml():
    """In line and displayed; a function's name is set off from what follows it."""
    made = typeset("With $\\log r_w$ it is\n\n$$\nr_l - 1\n$$\n")

    assert '<mi>log</mi><mspace width="0.17em"/><msub><mi>r</mi><mi>w</mi></msub>' in made
    assert 'display="block"' in made


@pytest.mark.parametrize(
    "broken", [r"\frac{1}{", r"\unknowncommand{x}", r"x_a_b", r"\left( x", r"\frac{1}", "a}", "{a"]
)
def test_a_formula_that_does_not_convert_ends_the_build(broken):
    """With the formula in the message."""
    with pytest.raises(PluginError, match=re.escape(broken)):
        typeset(f"A formula: ${broken}$.")


def test_links_to_files_of_the_repository_lead_to_their_pages_on_the_site():
    """Beside a page, above it, in the README, to a notebook; what looks like a link in code is none."""
    hooks = load_hooks()

    def made(uri, text):
        return hooks.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=uri)))

    assert made("how-to/lora.md", "[a](../start.md#b)") == "[a](../start.md#b)"
    assert made("index.md", "[a](../SECURITY.md)") == "[a](files/SECURITY.md)"
    assert made("index.md", "[`a`](examples/turns.ipynb)") == "[`a`](files/docs/examples/turns.ipynb.md)"
    assert made("files/README.md", "[a](docs/api.md) [b](#c)") == "[a](../api.md) [b](#c)"
    assert made("index.md", '`LOSSES["a"](b)`') == '`LOSSES["a"](b)`'
    with pytest.raises(PluginError, match=r"index.md: ../NOTHING.md is no file"):
        made("index.md", "[a](../NOTHING.md)")


def test_a_search_for_a_name_finds_its_own_page_first():
    """The page of `grpo` counts more than the page of `dr-grpo`, which has the word more often."""
    found = load_hooks().entry_pages()

    assert found["methods/credits/grpo.md"].startswith("---\nsearch: {boost: 4}\n---\n# ")
    assert found["methods/credits/dr-grpo.md"].startswith("# ")


def test_the_table_of_extras_has_all_of_them():
    """With what each is for and brings; made from pyproject.toml as the site is built."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="install.md"))

    table = load_hooks().on_page_markdown("<!-- extras -->", page).splitlines()[2:]

    assert [line.split("`")[1] for line in table] == list(extras)
    assert all(
        package in line for line, packages in zip(table, extras.values(), strict=True) for package in packages
    )


def test_the_table_of_peer_settings_has_all_of_them():
    """`TurnConfig` has `max_length` too, and no `num_generations`; it says where its own setting differs."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="trainer.md"))

    table = load_hooks().on_page_markdown("<!-- peers -->", page)

    assert [name for name in peers() if f"`{name}`" not in table] == []
    assert "| `max_length` | The same. | Write `model.max_length`. |" in table
    assert "| `num_generations` | None. | Write `explore.samples`, which" in table
    assert "| `resume_from_checkpoint` | Give it to `TurnTrainer.train()`. | The same command" in table
    assert "| `use_liger_kernel` | It needs `liger_kernel_config={'fused_linear" in table
    assert re.search(r"\| `epsilon` \| .* write `loss=\{'name': 'ppo-clip', 'clip_low': 0.2\}`\. \|", table)
    assert re.search(r"\| `eos_token`, `pad_token` \| [^|]* \| – \|", table)


def test_the_site_leaves_out_scripts_and_their_caches():
    """Pages and figures stay."""
    left_out = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["exclude_docs"]
    spec = pathspec.GitIgnoreSpec.from_lines(left_out.splitlines())
    files = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("*.py")]

    assert "measured.py" in files
    assert all(map(spec.match_file, [*files, "__pycache__/hooks.cpython-311.pyc"]))
    assert not any(map(spec.match_file, ["results.md", "figures/results/online.svg"]))
