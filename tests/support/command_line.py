"""What a refusal of the command line looks like."""


def assert_refused(result, says):
    """Code 2, nothing on standard output, and one line that starts with error."""
    code, output, notices = result
    assert (code, output) == (2, "")
    assert len(notices.splitlines()) == 1, notices
    assert notices.startswith("error: ")
    assert says in notices
