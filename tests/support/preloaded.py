"""What the process that forks runs does last, so that not every run does it: it is imported behind all other modules.

Our chat templates are compiled, and what was imported is left out of every search for garbage.
"""

import gc

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from perturn.chat.templates import TEMPLATES, replacement

_WORDS = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
replacement(
    PreTrainedTokenizerFast(tokenizer_object=_WORDS, chat_template=next(iter(TEMPLATES.values())).text)
)
gc.collect()
gc.freeze()
