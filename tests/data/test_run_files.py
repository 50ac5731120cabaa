"""Notes in a run folder, as they are read back."""

import pytest

from perturn.data.run_files import read_note


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999", "-" + "9" * 400, "9" * 5000])
def test_what_is_no_number_reads_as_null(tmp_path, number):
    """JSON has no such number, and nothing that is made from a note could be written as JSON."""
    file = tmp_path / "note.json"
    file.write_text(f'{{"name": {number}, "other": 1.5}}')

    assert read_note(file, dict) == {"name": None, "other": 1.5}
