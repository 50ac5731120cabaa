"""Small trained tokenizers of the common kinds, and chat templates."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


CORPUS = [
    "go north to the door and open it",
    "take the lamp in the room",
    "why: I see a door. user: assistant: ",
] * 9


TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-2": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' </s>' }}"
        "{% else %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "vicuna": (
        "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}"
        "{% elif m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ASSISTANT:' }}"
        "{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
    ),
    "tight": (  # the answer follows a special token
        "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    ),
}


_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def sentencepiece(prepend=None, normalizer=None, model="bpe"):
    """Return a tokenizer like transformers' Llama, Mistral and Gemma: with a legacy normalizer or with Metaspace."""
    if model == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=420, special_tokens=[*SPECIALS, *bytes_], initial_alphabet=["\n"], show_progress=False
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # a space only begins a token
    tokenizer.train_from_iterator(CORPUS, trainer)
    split = model == "unigram"
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme=prepend, split=split) if prepend else None
    )
    tokenizer.normalizer = normalizer
    tokenizer.decoder = _DECODER
    return tokenizer


def byte_level(add_prefix_space):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    alphabet = list("abcdefghijklmnopqrstuvwxyz0123456789<>|:.[]/")
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return tokenizer


KINDS = {
    "legacy": lambda: sentencepiece(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "metaspace-first": lambda: sentencepiece("first"),
    "metaspace-always": lambda: sentencepiece("always"),
    "gemma": lambda: sentencepiece(normalizer=normalizers.Replace(" ", "▁")),
    "unigram": lambda: sentencepiece("always", model="unigram"),
    "byte-level": lambda: byte_level(False),
    "byte-level-space": lambda: byte_level(True),
    "wordpiece": word_piece,
}
