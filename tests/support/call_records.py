"""Records of model calls, in the format of a log."""

from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "formats" / "logs"
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def call(answer, *messages, **others):
    """Return a record of one call."""
    identity = others.pop("id", None)
    response = {"choices": [{"message": said(answer)}]} | ({"id": identity} if identity else {})
    return {"request": {"messages": list(messages)}, "response": response} | others


def chat(session, *answers, task="find it", **last):
    """Return records of a conversation that only grows. The last record has additional fields."""
    messages, records = [SYSTEM, user(task)], []
    for number, answer in enumerate(answers):
        more = last if number == len(answers) - 1 else {}
        records.append(call(answer, *messages, session_id=session, **more))
        messages += [said(answer), user(f"seen {number}")]
    return records
