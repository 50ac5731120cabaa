"""Check how the command line reports an error."""


def assert_refused(result, says):
    """Check for exit code 2, empty standard output, and one line of error with a text."""
    code, output, notices = result
    assert (code, output) == (2, "")
    assert len(notices.splitlines()) == 1, notices
    assert notices.startswith("error: ")
    assert says in notices
