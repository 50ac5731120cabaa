"""Messages of errors quote what is long in part."""

from perturn.errors import DataError
from perturn.io.plain_data import mismatch


def test_a_message_of_any_length_is_cut_in_its_middle():
    """Its place and its remedy stay; one of usual length is left as it is."""
    said = str(DataError(f"rows.jsonl:3: got {'9' * 100_000}. Correct it."))

    assert len(said) < 2000
    assert said.startswith("rows.jsonl:3: got 99")
    assert said.endswith("99. Correct it.")
    assert str(DataError("short")) == "short"


def test_a_large_value_is_quoted_in_part():
    """A file of rows in one JSON list is one error of one line, not a screen of rows."""
    row = {name: [{"role": "user", "content": "x" * 40}] * 6 for name in ("prompt", "chosen", "rejected")}

    assert len(mismatch("a JSON object", [row] * 10)) < 260
