"""Chat templates, compiled: imported by the process that forks runs, so that not every run compiles all of ours."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from perturn.chat.templates import TEMPLATES, replacement

_WORDS = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
replacement(
    PreTrainedTokenizerFast(tokenizer_object=_WORDS, chat_template=next(iter(TEMPLATES.values())).text)
)
