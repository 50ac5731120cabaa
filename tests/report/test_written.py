"""What the stages write for the report alone."""

import json

from perturn.data.run_files import note_tokens


def test_the_text_of_each_token_is_noted_once(tokenizer, tmp_path):
    """Joined, the texts are what was said, the space before a word included; what was noted stays."""
    said = "Action: go to the door\n"
    ids = tokenizer.encode(said, add_special_tokens=False)
    (tmp_path / "tokens.json").write_text(json.dumps({"999": "kept"}))

    note_tokens(tmp_path / "tokens.json", ids, tokenizer)

    texts = json.loads((tmp_path / "tokens.json").read_text())
    assert "".join(texts[str(token)] for token in ids) == said
    assert texts["999"] == "kept"
    assert len(texts) == len(set(ids)) + 1


def test_nothing_new_writes_nothing(tmp_path):
    (tmp_path / "tokens.json").write_text('{"7": "a"}')
    before = (tmp_path / "tokens.json").stat().st_mtime_ns

    note_tokens(tmp_path / "tokens.json", [7, 7], tokenizer=None)

    assert (tmp_path / "tokens.json").stat().st_mtime_ns == before
