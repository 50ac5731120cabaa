"""Shared work of the fork server that is done once, after all other modules are imported.

The server reads a recipe, compiles the report's templates and Perturn's chat templates, and compresses the library of
the figures. It also excludes imported objects from garbage collection.
"""

import gc
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from perturn.chat.template_variants import TEMPLATES
from perturn.chat.templates import replacement
from perturn.config.recipe import read_recipe
from perturn.report import report_page

_WORDS = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
replacement(
    PreTrainedTokenizerFast(tokenizer_object=_WORDS, chat_template=next(iter(TEMPLATES.values())).text)
)
read_recipe(Path("demo"))
_PAGES = report_page._environment((report_page.ASSETS,), (*report_page._FILTERS, *report_page.RUN_FILTERS))
for _name in _PAGES.list_templates(extensions=["j2"]):
    _PAGES.get_template(_name)
report_page._packed(report_page.get_plotlyjs())
gc.collect()
gc.freeze()
